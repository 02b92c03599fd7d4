"""Stacked storage: the same names and bytes, whatever the layout; fewer arrays on the medium."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding
from orbax.checkpoint import v1 as ocp
from support import (
    P,
    assert_trees_identical,
    bits,
    fsdp_mesh,
    fsdp_rule,
    train_step,
    training_state,
)

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt import torchax_backend as backend
from torchax_ckpt.layout import plan as planning
from torchax_ckpt.snapshot import Planner, execute

LAYOUTS = ("auto", "stacked", "flat")


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
        for name, tensor in model.state_dict(keep_vars=True).items():
            backend.set_buffer(tensor, jax.device_put(backend.buffer(tensor), rule(name, tensor)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def saved(directory: Path, layout: Any, rule: Any = None) -> list[Any]:
    model, optimizer = deep(rule=rule)
    options = CheckpointOptions(layout=layout)
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        ckpt.attach(model, optimizer)
        for step in ckpt.steps(2):
            train_step(model, optimizer, step)
    return training_state(model, optimizer)


def stored_names(directory: Path, step: int = 2) -> set[str]:
    metadata: Any = ocp.metadata(directory / str(step)).metadata
    return {f"{component}/{rest}" for component, tree in metadata.items() for rest in tree}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", [None, fsdp_rule(fsdp_mesh(8))], ids=["one_device", "fsdp8"])
def test_every_layout_restores_into_a_program_of_any_other(
    layout: str, rule: Any, directory: Path
) -> None:
    expected = saved(directory, layout, rule)
    for other, target in zip(LAYOUTS, (None, fsdp_rule(fsdp_mesh(4)), rule), strict=True):
        model, optimizer = deep(rule=target)
        options = CheckpointOptions(layout=other)  # type: ignore[arg-type]
        assert TorchaxCheckpointer(directory, options=options).attach(model, optimizer) == 2
        same_mesh = target is rule
        assert_trees_identical(training_state(model, optimizer), expected, shardings=same_mesh)
        for name, tensor in model.state_dict().items():
            if target is not None:
                assert backend.buffer(tensor).sharding == target(name, tensor)


def test_layers_are_stored_as_one_array_under_their_pattern(directory: Path) -> None:
    saved(directory, "auto")
    stored = stored_names(directory)
    assert "model/layers.%2A.mlp.weight" not in stored
    assert "model/layers.*.mlp.weight" in stored
    assert "optimizer/layers.*.mlp.weight/exp_avg" in stored
    assert "model/head.weight" in stored
    assert "host_scalars/float32" in stored
    assert not any("layers.0" in name for name in stored)
    manifest = json.loads((directory / "2" / "manifest" / "data.json").read_text())
    assert manifest["stacks"]["model/layers.*.mlp.weight"] == [
        f"model/layers.{i}.mlp.weight" for i in range(4)
    ]


def test_flat_stores_every_leaf_under_its_own_name(directory: Path) -> None:
    saved(directory, "flat")
    stored = stored_names(directory)
    assert not any("*" in name for name in stored)
    assert {"model/layers.3.norm.bias", "optimizer/layers.3.norm.bias/step"} <= stored


def test_with_orbax_alone_a_stack_is_an_array_with_a_leading_axis(directory: Path) -> None:
    model, optimizer = deep(rule=fsdp_rule(fsdp_mesh(8)))
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model, optimizer)
        ckpt.save(1, force=True)
    metadata: Any = ocp.metadata(directory / "1").metadata
    one_device = SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=one_device), metadata["model"]
    )
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        loaded: Any = ocp.load(directory / "1", {"model": abstract})
    stack = loaded["model"]["layers.*.mlp.weight"]
    for i in range(4):
        weight = model.get_parameter(f"layers.{i}.mlp.weight")
        assert bits(stack[i]) == bits(backend.buffer(weight))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_added_to_the_model_keep_what_they_have(layout: str, directory: Path) -> None:
    saved(directory, layout)
    model, _ = deep(depth=6)
    kept = {n: bits(t) for n, t in model.state_dict().items() if "layers.4" in n or "layers.5" in n}
    ckpt = TorchaxCheckpointer(directory)
    ckpt.attach(model, resume=False, rng=False)
    report = ckpt.restore(strict=False)
    assert set(report.missing) == {f"model/{n}" for n in kept}
    assert {n: bits(model.state_dict()[n]) for n in kept} == kept
    shallow, _ = deep(depth=2)
    other = TorchaxCheckpointer(directory)
    other.attach(shallow, resume=False, rng=False)
    assert "model/layers.3.mlp.weight" in other.restore(strict=False).unexpected
    for name, tensor in shallow.state_dict().items():
        assert bits(tensor) == bits(model.state_dict()[name])


def spec(nbytes: int, placement: Any = 1, shape: tuple[int, ...] = (2,)) -> planning.LeafSpec:
    return planning.LeafSpec(shape, "float32", nbytes, placement, on_host=False)


def plan(specs: dict[str, planning.LeafSpec], layout: Any = "auto") -> planning.Plan:
    return planning.plan_leaves(list(specs), list(specs.values()), layout)


def test_large_leaves_stay_on_their_own_unless_told() -> None:
    big = planning.MAX_STACKED_LEAF_BYTES + 1
    specs = {f"model/layers.{i}.w": spec(big) for i in range(3)}
    assert plan(specs).stacks == {}
    assert list(plan(specs, "stacked").stacks) == ["model/layers.*.w"]
    assert plan(specs, "flat").stacks == {}


def test_only_equals_share_a_stack_and_its_size_is_bounded() -> None:
    specs = {
        "model/layers.0.w": spec(8),
        "model/layers.1.w": spec(8),
        "model/layers.2.w": spec(8, placement=2),
        "model/layers.3.w": spec(8, placement=2),
        "model/layers.4.w": spec(12, shape=(3,)),
        "model/layers.5.w": spec(8, placement=None),
        "model/layers.6.w": spec(8, placement=None),
        "model/w": spec(8),
        "model/layers.x1.w": spec(8),
    }
    assert plan(specs).stacks == {
        "model/layers.*.w": ("model/layers.0.w", "model/layers.1.w"),
        "model/layers.*.w*2": ("model/layers.2.w", "model/layers.3.w"),
    }
    half = planning.MAX_STACK_BYTES // 2
    many = {f"m/{i}.w": spec(half) for i in range(5)}
    assert [len(members) for members in plan(many, "stacked").stacks.values()] == [2, 2]


def test_layers_and_experts_share_one_stack() -> None:
    specs = {f"model/layers.{i}.experts.{e}.w1": spec(8) for i in range(3) for e in range(4)}
    assert plan(specs).stacks == {"model/layers.*.experts.*.w1": tuple(specs)}


DTYPES = ("float32", "bfloat16", "int8", "bool", "float8_e4m3fn")
PARTS = st.sampled_from(["layers", "w", "0", "1", "7", "12", "a.b", "x/y", "*", "%", "3d"])


@st.composite
def leaves(draw: st.DrawFn) -> dict[str, Any]:
    from torchax_ckpt.layout import names

    keys = draw(
        st.sets(st.lists(PARTS, min_size=1, max_size=3).map(tuple), min_size=1, max_size=12)
    )
    mesh = fsdp_mesh(4)
    result: dict[str, Any] = {}
    for number, key in enumerate(sorted(keys)):
        name = names.join(("model", ".".join(key)))
        shape = draw(st.sampled_from([(), (4,), (4, 2), (0, 3)]))
        dtype = draw(st.sampled_from(DTYPES))
        where = draw(st.sampled_from(["host", "one", "sharded", "replicated"]))
        count = np.arange(number, number + np.prod(shape, dtype=int))
        host = count.reshape(shape).astype(np.dtype(dtype))
        if where == "host":
            result[name] = host
        else:
            spec_ = P("fsdp") if where == "sharded" and shape[:1] == (4,) else P()
            one = SingleDeviceSharding(jax.devices()[1])
            result[name] = jax.device_put(
                host, one if where == "one" else NamedSharding(mesh, spec_)
            )
    return result


@settings(max_examples=40)
@given(leaves(), st.sampled_from(LAYOUTS), st.booleans())
def test_every_leaf_is_found_where_the_plan_says(
    tree: dict[str, Any], layout: Any, copy: bool
) -> None:
    found = Planner(layout)(list(tree), list(tree.values()))
    stored = execute(found, tree, copy=copy)
    located = found.locate()
    for name, array in tree.items():
        if name in found.empty:
            assert array.size == 0
            assert name not in stored
        elif name in located:
            where, index = located[name]
            assert bits(np.asarray(stored[where])[index, ...]) == bits(np.asarray(array))
        else:
            assert bits(stored[name]) == bits(array)
    assert set(stored) == set(found.stacks) | (set(tree) - set(located) - found.empty)


@settings(max_examples=6)
@given(leaves(), st.sampled_from(LAYOUTS), st.sampled_from(["reference", "copy", "transfer"]))
def test_any_tree_survives_any_layout_and_snapshot(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any], layout: Any, snapshot: Any
) -> None:
    directory = tmp_path_factory.mktemp("run")
    options = CheckpointOptions(layout=layout, snapshot=snapshot)
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        ckpt.save(1, state=tree)
    assert_trees_identical(TorchaxCheckpointer(directory).load(abstract_state=tree), tree)
