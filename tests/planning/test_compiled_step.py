"""Plans of compiled steps, on CPU devices in place of the chips that need libtpu."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, SingleDeviceSharding
from support.training import P, fsdp_mesh
from torchax import interop

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.errors import PlanError
from torchax_ckpt.planning import StepPlan, step_on_topology, topology_plan
from torchax_ckpt.planning.topology import CHIPS

ROWS, WHOLE = (NamedSharding(fsdp_mesh(), spec) for spec in (P("fsdp"), P()))
USABLE = CHIPS["v5e"].usable_bytes
LEAF = jax.ShapeDtypeStruct((8, 1024), jnp.float32, sharding=ROWS)
LEAF_BYTES = 4096
"""Bytes that a device has of a leaf."""


def state_of(num_layers: int = 3) -> dict[str, Any]:
    return {"params": {f"layers.{i}.w": LEAF for i in range(num_layers)}, "step": 5}


def shifted(state: Any) -> Any:
    return jax.tree.map(lambda x: x + 1, state)


def test_donated_arguments_are_counted_once_and_other_state_beside_the_step() -> None:
    state = state_of() | {"scale": jax.ShapeDtypeStruct((), jnp.float32, sharding=WHOLE)}
    params = state["params"]
    kept = step_on_topology("v5e:2x4", jax.jit(shifted), params, state=params)
    donating = jax.jit(shifted, donate_argnums=0)
    donated = step_on_topology("v5e:2x4", donating, params, state=params)
    assert (kept.argument_bytes, kept.donated_bytes) == (3 * LEAF_BYTES, 0)
    assert (donated.argument_bytes, donated.donated_bytes) == (3 * LEAF_BYTES, 3 * LEAF_BYTES)
    assert kept.step_bytes - donated.step_bytes >= 3 * LEAF_BYTES
    assert donated.step_bytes >= 3 * LEAF_BYTES
    assert (donated.num_chips, donated.usable_bytes) == (8, USABLE)
    # A snapshot takes copies and stacks of all state.
    more = step_on_topology("v5e:2x4", jax.jit(shifted), params, state=[state, LEAF])
    assert more.state_bytes == more.copy_bytes == 4 * LEAF_BYTES + 4
    assert (more.snapshot, more.offload_host_bytes) == ("copy", 0)
    assert more.step_bytes == kept.step_bytes + LEAF_BYTES + 4
    assert more.argument_bytes == kept.argument_bytes


def test_a_program_of_torchax_on_one_chip_is_planned_too() -> None:
    step = interop.jax_jit(lambda x: x + 1, {"donate_argnums": (0,)})
    chip = SingleDeviceSharding(jax.devices()[1])
    leaf = jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=chip)
    found = step_on_topology("v5e:2x4", step, leaf, state=[leaf])
    assert (found.donated_bytes, found.state_bytes, found.num_chips) == (4096, 4096, 1)


def test_leaves_are_stacked_as_a_save_stacks_them(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    plan_snapshot = topology_plan.plan_snapshot

    def noting(names: Any, *args: Any) -> Any:
        asked.extend(names)
        return plan_snapshot(names, *args)

    monkeypatch.setattr(topology_plan, "plan_snapshot", noting)
    abstract = [state_of(), {"a/b": (LEAF, LEAF)}]
    step_on_topology("v5e:2x4", jax.jit(shifted), state_of(), state=abstract)
    arrays = jax.tree.map(
        lambda x: x if isinstance(x, int) else jax.device_put(np.zeros(x.shape, x.dtype), ROWS),
        abstract,
    )
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=arrays)
    manifest = json.loads((directory / "1" / "manifest" / "data.json").read_text())
    members = [name for group in manifest["stacks"].values() for name in group]
    assert sorted(asked) == sorted(n for n in members if n.startswith("state/"))


@pytest.mark.parametrize(
    ("snapshot", "copy_bytes", "said"),
    [
        ("copy", 2500, "2,500 bytes for copies of 2,000 bytes of state"),
        ("offload", 0, "4,000 bytes of the host for copies of 2,000 bytes of state"),
        ("transfer", 0, "none; training waits until 2,000 bytes of state are on the host"),
    ],
)
def test_a_plan_reads_as_a_table(snapshot: str, copy_bytes: int, said: str) -> None:
    sizes = {"argument_bytes": 3000, "donated_bytes": 2000, "step_bytes": 5000}
    sizes |= {"state_bytes": 2000, "copy_bytes": copy_bytes, "usable_bytes": 16000}
    plan = StepPlan(
        topology="v5e:2x4",
        num_chips=8,
        versions="jax 1 and libtpu 2",
        snapshot=snapshot,
        offload_host_bytes=4000,
        **sizes,
    )
    assert str(plan).splitlines() == [
        "compiled:        with jax 1 and libtpu 2; nothing was measured",
        "chips:           8 of v5e:2x4; all sizes are of one chip",
        "donated:         2,000 of 3,000 bytes of arguments",
        "the step:        5,000 bytes while it runs",
        f"a snapshot:      {said}",
        f"together:        {5000 + copy_bytes:,} of 16,000 bytes that programs can use",
        f'snapshot="auto": takes snapshots by {snapshot}',
    ]


def test_a_snapshot_without_memory_for_copies_is_offloaded_or_transferred(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed = step_on_topology("v5e:2x4", jax.jit(shifted), LEAF, state=[LEAF]).step_bytes
    small = dataclasses.replace(CHIPS["v5e"], usable_bytes=needed + LEAF_BYTES)
    monkeypatch.setitem(CHIPS, "v5e", small)

    def planned(num_bytes: int | None) -> StepPlan:
        settings: dict[str, Any] = {"state": [LEAF], "host_memory_bytes": num_bytes}
        return step_on_topology("v5e:2x4", jax.jit(shifted), LEAF, **settings)

    wanted = 8 * LEAF_BYTES * 2 * 5 // 4  # eight chips; pinned and ordinary; a quarter more
    for found in (planned(None), planned(wanted)):
        assert found.snapshot == "offload"  # a quarter more than the copies must be free
        assert found.copy_bytes == 0
        assert found.offload_host_bytes == 8 * LEAF_BYTES * 2
    found = planned(wanted - 1)
    assert (found.snapshot, found.copy_bytes, found.offload_host_bytes) == ("transfer", 0, 0)


def wrong(x: Any) -> Any:
    raise ValueError("of the model")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"argument": {"w": np.zeros(3)}},
            r"argument 0 of the step\['w'\]: .*abstract array.*found ndarray",
        ),
        (
            {"argument": [jax.ShapeDtypeStruct((8,), jnp.int8)]},
            r"step\[0\]: .* a sharding .*ShapeDtypeStruct",
        ),
        ({"argument": torch.zeros(2)}, "of the step: .*found Tensor; give jax.ShapeDtypeStruct"),
        (
            {"argument": jax.ShapeDtypeStruct((9, 2), jnp.int8, sharding=ROWS)},
            r"expected a shape that the sharding divides, found \[9, 2\]; .*JAX says",
        ),
        ({"state": {"w": np.zeros(3)}}, r"state\['w'\]: .*found ndarray"),
        ({"state": {"step": 3}}, "state: expected at least one abstract array, found none"),
        ({"step": shifted}, "step: expected a jitted function, .*found <function"),
        ({"topology": "v9:2x4"}, "unknown TPU topology: .*'v9:2x4'"),
        ({"step": jax.jit(wrong)}, "of the model"),  # stays an error of the step itself
    ],
)
def test_an_argument_that_makes_no_plan_is_named(change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"topology": "v5e:2x4", "step": jax.jit(shifted), "argument": LEAF}
    given |= {"state": [LEAF], **change}
    arguments = [given[name] for name in ("topology", "step", "argument")]
    with pytest.raises((PlanError, ValueError), match=said) as caught:
        step_on_topology(*arguments, state=given["state"])
    assert isinstance(caught.value, PlanError) == (said != "of the model")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm",
            rf"exceeds the memory of a chip of v5e:2x4: expected at most {USABLE} bytes; .*"
            "Ran out of memory",
        ),
        ("INTERNAL: Mismatched version", "libtpu cannot be used: .*Mismatched version"),
    ],
)
def test_what_the_compiler_refuses_is_said(message: str, said: str) -> None:
    class Refused:
        def lower(self, *arguments: Any) -> Any:
            raise jax.errors.JaxRuntimeError(message)

    step: Any = Refused()
    with pytest.raises(PlanError, match=said):
        step_on_topology("v5e:2x4", step, LEAF, state=[LEAF])
