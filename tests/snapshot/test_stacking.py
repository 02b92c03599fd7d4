"""Stacked storage: the same names and bytes, whatever the layout; fewer arrays on the medium."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from orbax.checkpoint import v1 as ocp
from support.compare import assert_trees_identical
from support.strategies import DTYPES_BY_KIND, make_leaf
from support.training import P, adamw, fsdp_mesh, fsdp_rule, place, train_and_save, train_step

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, torchax_backend
from torchax_ckpt.options import Codec, SnapshotMode
from torchax_ckpt.snapshot import stacking

LAYOUTS = ("auto", "flat")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mlp(self.norm(x)))


class Deep(torch.nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(depth))
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def deep(depth: int = 4, rule: Any = None) -> tuple[Deep, torch.optim.Optimizer]:
    model = Deep(depth).to("jax")
    if rule is not None:
        place(model, rule)
    return model, adamw(model)


def stored_names(directory: Path, step: int = 2) -> set[str]:
    metadata: Any = ocp.metadata(directory / str(step)).metadata
    return {f"{component}/{rest}" for component, tree in metadata.items() for rest in tree}


def test_off_the_training_thread_no_program_spans_cpu_devices(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads that start such programs can hang in XLA."""
    mesh, values = fsdp_mesh(4), np.arange(4096).reshape(128, 8, 4)
    specs = {"rows": P("fsdp"), "columns": P(None, "fsdp"), "whole": P()}
    state = {
        f"{name}.{dtype}.{i}": jax.device_put(value.astype(dtype), NamedSharding(mesh, spec))
        for (name, spec), dtype in itertools.product(specs.items(), ("float32", "bfloat16"))
        for i, value in enumerate(values)
    }
    options = CheckpointOptions(snapshot="reference")
    run = Mock(side_effect=AssertionError("a program of a save"))
    defaults: Any = stacking.execute.__kwdefaults__
    monkeypatch.setitem(defaults, "run", run)
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        ckpt.save(1, state=state)
        ckpt.wait_until_finished()
        assert_trees_identical(ckpt.load(1, state), dict(sorted(state.items())))
    stacks = {f"state/{name}.{dtype}.*" for name in specs for dtype in ("float32", "bfloat16")}
    assert stacks <= stored_names(directory, 1)


def test_layers_are_stored_as_one_array_under_their_pattern_or_each_by_itself(
    tmp_path: Path,
) -> None:
    model, optimizer = deep()
    train_and_save(tmp_path / "auto", model, optimizer)
    stored = stored_names(tmp_path / "auto")
    moment = "optimizer/layers.*.mlp.weight/exp_avg"
    assert {"model/layers.*.mlp.weight", moment, "model/head.weight"} <= stored
    assert "host_scalars/float32" in stored
    assert not any("layers.0" in name or "%2A" in name for name in stored)
    manifest = json.loads((tmp_path / "auto" / "2" / "manifest" / "data.json").read_text())
    assert manifest["stacks"]["model/layers.*.mlp.weight"] == [
        f"model/layers.{i}.mlp.weight" for i in range(4)
    ]
    with TorchaxCheckpointer(tmp_path / "flat", options=CheckpointOptions(layout="flat")) as ckpt:
        ckpt.attach(model, optimizer)
        ckpt.save(2, force=True)
    stored = stored_names(tmp_path / "flat")
    assert not any("*" in name for name in stored)
    assert {"model/layers.3.norm.bias", "optimizer/layers.3.norm.bias/step"} <= stored


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [(torch.optim.AdamW, {"capturable": True}), (torch.optim.ASGD, {})],
    ids=["adamw_capturable", "asgd"],
)
def test_state_made_by_an_eager_first_step_on_sharded_parameters_is_stacked(
    kind: Any, settings: dict[str, Any], directory: Path
) -> None:
    """It begins as ``zeros_like``, which is on one device; what the step makes of it counts."""
    stored = []
    for step in (1, 2):  # fresh, and in a program that was restored
        model, _ = deep(rule=fsdp_rule(fsdp_mesh(8)))
        lr: Any = torch.tensor(1e-2, device="jax") if "capturable" in settings else 1e-2
        optimizer = kind(model.parameters(), lr=lr, **settings)
        with TorchaxCheckpointer(directory) as ckpt:
            assert ckpt.attach(model, optimizer) == step - 1
            train_step(model, optimizer, step)
            ckpt.save(step, force=True)
        stored.append(stored_names(directory, step))
    assert {n for n in stored[0] if "layers.*.mlp.weight" in n} > {"model/layers.*.mlp.weight"}
    assert not any("layers.0" in name or "*2" in name for name in stored[0])
    assert stored[0] == stored[1]


WORDS = ("w", "a.b", "x/y", "*", "%", "%2A", "3d", "é ü", "\n", "layers", "")
PATTERNS = ("layers.{}.w", "{}", "a/{}/b", "*.{}", "{}.%.{}", "é.{}.w", "mlp.{}")
SHAPES = ((), (0, 3), (1,), (8,), (8, 4), (3, 8), (2, 3, 8))
# Meshes of one and two axes, of all devices, some, and in another order.
GRID = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
TURNED = Mesh(np.array(jax.devices())[::-1].reshape(2, 4), ("a", "b"))
SPECS = (
    P(), P("a"), P(None, "b"), P("a", "b"), P("b", "a"), P(("a", "b")), P(None, None, ("b", "a")),
)  # fmt: skip
SHARDINGS: tuple[Any, ...] = (
    None,  # not committed
    *(SingleDeviceSharding(jax.devices()[i]) for i in (0, 5)),
    *(NamedSharding(mesh, spec) for mesh in (GRID, TURNED) for spec in SPECS),
    NamedSharding(fsdp_mesh(2), P("fsdp")),
)
DEVICE_KINDS = ("jax", "torchax", "key")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a leaf of a drawn tree is, but for where it is."""

    kind: str
    dtype: str
    shape: tuple[int, ...]

    def make(self, seed: int, sharding: Any) -> Any:
        """One of arbitrary bits."""
        leaf = make_leaf(self.kind, self.dtype, self.shape, seed)
        if sharding is None or self.kind not in DEVICE_KINDS:
            return leaf
        if self.kind == "torchax":
            return torchax_backend.wrap(
                jax.device_put(torchax_backend.buffer(leaf), self.fit(sharding))
            )
        return jax.device_put(leaf, self.fit(sharding))

    def fit(self, sharding: Any) -> Any:
        """The sharding without the mesh axes that do not divide their dim."""
        if not isinstance(sharding, NamedSharding):
            return sharding
        spec = []
        for length, axes in itertools.zip_longest(self.shape, sharding.spec[: len(self.shape)]):
            names_ = axes if isinstance(axes, tuple) else (axes,) if axes else ()
            divides = length % math.prod(sharding.mesh.shape[a] for a in names_) == 0
            spec.append(axes if divides else None)
        return NamedSharding(sharding.mesh, P(*spec))


@st.composite
def trees_of_layers(draw: st.DrawFn) -> dict[str, tuple[Leaf, Any, Any]]:
    """Names -> leaf, where it is, and where it shall be; groups of equals among them."""
    tree: dict[str, tuple[Leaf, Any, Any]] = {}
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(sorted(DTYPES_BY_KIND.keys() - {"numpy_scalar"})))
        leaf = Leaf(
            kind, draw(st.sampled_from(DTYPES_BY_KIND[kind])), draw(st.sampled_from(SHAPES))
        )
        pattern = draw(st.sampled_from(PATTERNS) | st.lists(st.sampled_from(WORDS)).map(".".join))
        before, after = draw(st.sampled_from(SHARDINGS)), draw(st.sampled_from(SHARDINGS))
        for i in draw(st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True)):
            # Now and then one of the group is elsewhere.
            where = draw(st.sampled_from((*[before] * 7, SHARDINGS[-1])))
            tree.setdefault(pattern.replace("{}", str(i)), (leaf, where, after))
    return dict(sorted(tree.items()))  # as JAX orders dicts


@settings(max_examples=40)
@given(
    trees_of_layers(),
    st.sampled_from(LAYOUTS),
    st.sampled_from(get_args(SnapshotMode)),
    st.sampled_from([False, *get_args(Codec)]),
    st.sampled_from([None, 1, 1 << 10]),
)
def test_any_tree_survives_any_layout_snapshot_and_change_of_mesh(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: dict[str, tuple[Leaf, Any, Any]],
    layout: Any,
    snapshot: Any,
    compression: bool | Codec,
    max_host_bytes: int | None,
) -> None:
    directory = tmp_path_factory.mktemp("run")
    options = CheckpointOptions(
        layout=layout, snapshot=snapshot, compression=compression, max_host_bytes=max_host_bytes
    )
    items = list(enumerate(drawn.items()))
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        ckpt.save(1, state={name: leaf.make(seed, at) for seed, (name, (leaf, at, _)) in items})
    expected = {name: leaf.make(seed, to) for seed, (name, (leaf, _, to)) in items}
    others = {name: leaf.make(seed + 99, to) for seed, (name, (leaf, _, to)) in items}
    reader = TorchaxCheckpointer(directory)
    assert_trees_identical(reader.load(abstract_state=others), expected)
    assert_trees_identical(reader.load(), expected, shardings=False)
    shutil.rmtree(directory)
