"""Plans of saves on a topology, on CPU devices that stand for the chips of one host.

What the TPU's compiler answers is tested in tests/tpu.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from torchax_ckpt import planning
from torchax_ckpt.devices.device_memory import DeviceMemory
from torchax_ckpt.errors import PlanError
from torchax_ckpt.planning import topology
from torchax_ckpt.planning.topology_plan import fsdp_and_tp
from torchax_ckpt.snapshot.snapshotter import Snapshotter

V5E = topology.CHIPS["v5e"]
MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("eight_chips")


def layers(count: int = 4, shape: tuple[int, ...] = (512, 512)) -> dict[str, Any]:
    return {f"model/{i}.weight": jax.ShapeDtypeStruct(shape, jnp.float32) for i in range(count)}


def sharded(state: dict[str, Any], spec: P, axis: str = "fsdp", size: int = 8) -> dict[str, Any]:
    sharding = NamedSharding(Mesh(jax.devices()[:size], (axis,)), spec)
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for name, leaf in state.items()
    }


@pytest.mark.parametrize(
    ("shape", "axes", "spec"),
    [
        ((6, 24), {"fsdp": 8}, P(None, "fsdp")),
        ((6, 10), {"fsdp": 8}, P(None, None)),
        ((), {"fsdp": 8}, P()),
        ((16, 24), {"tp": 8}, P(None, "tp")),
        ((16,), {"tp": 8}, P(None)),  # no matrix
        ((16, 24), {"fsdp": 4, "tp": 2}, P("fsdp", "tp")),
        ((2, 24), {"fsdp": 4, "tp": 2}, P(None, "tp")),
        ((8, 3), {"fsdp": 4, "tp": 2}, P("tp", None)),
        ((16, 24), {"slice": 2, "fsdp": 4}, P(None, "fsdp")),  # replicated over slices
        ((0, 24), {"fsdp": 8}, P(None, "fsdp")),
    ],
)
def test_the_rule_of_sharding(shape: tuple[int, ...], axes: dict[str, int], spec: P) -> None:
    assert fsdp_and_tp(shape, axes) == spec


def test_what_a_plan_says() -> None:
    state = {**layers(), "model/norm": jax.ShapeDtypeStruct((6,), jnp.bfloat16)}
    plan = planning.on_topology(state, "v5e:2x4", training_bytes=5 * MIB)
    assert (plan.topology, plan.num_slices, plan.axes) == ("v5e:2x4", 1, {"fsdp": 8})
    assert (plan.num_chips, plan.num_hosts, plan.chips_per_host) == (8, 1, 8)
    assert (plan.num_leaves, plan.state_bytes) == (5, 4 * MIB + 12)
    on_chip = 4 * MIB // 8 + 12
    assert plan.chip_bytes == plan.chip_elements_bytes == on_chip  # CPUs have no tiles
    assert plan.replicated_bytes == 12
    assert (plan.hbm_bytes, plan.usable_bytes) == (16 << 30, V5E.usable_bytes)
    assert plan.free_bytes == V5E.usable_bytes - on_chip - 5 * MIB
    assert (plan.fits, plan.advice, plan.snapshot) == (True, "", "copy")
    assert plan.copy_bytes == on_chip
    assert (plan.host_memory_bytes, plan.offload_host_bytes) == (None, 0)
    assert plan.wanted_bytes == math.ceil(1.25 * on_chip)
    assert plan.num_programs == 2  # one stack, one copy
    assert plan.compile_secs is not None
    slices = planning.on_topology(layers(), "v5e:2x2", num_slices=2)
    assert (slices.axes, slices.chip_bytes) == ({"slice": 2, "fsdp": 4}, MIB)
    meshed = planning.on_topology(layers(), "v5e:2x4", axes={"fsdp": 2, "tp": 4})
    assert (meshed.axes, meshed.chip_bytes) == ({"fsdp": 2, "tp": 4}, 4 * MIB // 8)
    whole = planning.on_topology(sharded(layers(1), P()), "v5e:2x4")  # shardings are kept
    assert whole.chip_bytes == MIB


COPY_BYTES, ON_HOST = 4 * MIB // 8, 2 * 4 * MIB  # on a host: pinned and ordinary memory
WANTED, WANTED_ON_HOST = math.ceil(1.25 * COPY_BYTES), math.ceil(1.25 * ON_HOST)


@pytest.mark.parametrize(
    ("way", "free_bytes", "host_bytes"),
    [
        ("copy", WANTED, 0),
        ("offload", WANTED - 1, WANTED_ON_HOST),
        ("transfer", WANTED - 1, WANTED_ON_HOST - 1),
        ("transfer", 0, 0),
    ],
)
def test_a_save_of_real_arrays_takes_the_planned_snapshot(
    way: str, free_bytes: int, host_bytes: int
) -> None:
    sharding = NamedSharding(topology.mesh(jax.devices(), {"fsdp": 8}), P("fsdp"))
    arrays = {name: jnp.ones((512, 512), device=sharding) for name in layers()}
    training_bytes = V5E.usable_bytes - COPY_BYTES - free_bytes
    settings: dict[str, Any] = {"training_bytes": training_bytes, "host_memory_bytes": host_bytes}
    plan = planning.on_topology(arrays, "v5e:2x4", **settings)
    stats = {"bytes_limit": V5E.usable_bytes, "bytes_in_use": V5E.usable_bytes - free_bytes}
    memory = DeviceMemory(lambda device: stats, host_bytes=lambda: host_bytes)
    snapshotter = Snapshotter("auto", "auto", memory)
    snapshotter.donated()
    taken = snapshotter.take(list(arrays), [*arrays.values()])
    assert plan.snapshot == taken.way == way
    assert (plan.free_bytes, plan.fits, plan.copy_bytes) == (free_bytes, True, COPY_BYTES)
    assert plan.host_memory_bytes == host_bytes
    assert plan.offload_host_bytes == (ON_HOST if way == "offload" else 0)


def test_the_advice_for_a_state_that_does_not_fit() -> None:
    state = layers(5, (8, 1 << 30))  # 20 GiB on each chip
    plan = planning.on_topology(state, "v5e:2x4")
    assert not plan.fits
    assert plan.free_bytes == V5E.usable_bytes - (20 << 30)
    assert plan.advice == (
        "shard it over 2 times as many chips of the same generation, or take as many chips of a "
        "generation with more memory (v4, v5p, v6e)"
    )
    unknown = ("copy_bytes", "wanted_bytes", "snapshot", "offload_host_bytes", "num_programs")
    assert {getattr(plan, name) for name in (*unknown, "compile_secs")} == {None}
    wide = planning.on_topology(sharded(state, P()), "v5e:2x4")
    assert wide.advice == "shard the 171798691840 bytes of leaves that every chip holds"
    busy = planning.on_topology(layers(), "v5e:2x4", training_bytes=200 << 30)
    assert busy.advice == "reduce the memory that training needs"


@pytest.mark.parametrize(
    ("state", "settings", "message"),
    [
        ({}, {}, "expected at least one leaf on devices, found none"),
        ({"model/a": 3}, {}, r"model/a: expected a value with a shape .*, found int;"),
        (
            sharded(layers(1, (6, 6)), P("fsdp"), size=2),
            {},
            r"0.weight: expected a sharding that divides \[6, 6\] on the mesh {'fsdp': 8}",
        ),
        (sharded(layers(1), P("tp"), "tp"), {}, r"on the mesh {'fsdp': 8}, found P\('tp',\)"),
        (layers(1), {"training_bytes": -1}, "training_bytes: expected a number >= 0, found -1"),
        (layers(1), {"host_memory_bytes": -1}, "host_memory_bytes: .* >= 0, found -1"),
        (layers(1), {"axes": {"fsdp": 4}}, "found fsdp=4; change the axes"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    state: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        planning.on_topology(state, "v5e:2x4", **settings)
