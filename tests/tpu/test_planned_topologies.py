"""Plans of saves on TPU topologies, with the TPU's compiler."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from support.tpu import devices, one_host

from torchax_ckpt import planning
from torchax_ckpt.devices import device_programs
from torchax_ckpt.devices.device_memory import is_exhausted
from torchax_ckpt.errors import PlanError
from torchax_ckpt.planning import topology
from torchax_ckpt.planning.topology import CHIPS
from torchax_ckpt.planning.topology_plan import fsdp_and_tp
from torchax_ckpt.snapshot import offload
from torchax_ckpt.snapshot.planner import plan_snapshot

pytestmark = pytest.mark.tpu

ONE_HOST = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def adamw(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    return {
        f"{part}/{name}": jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in shapes.items()
        for part in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    }


def assert_plans_like_a_save(state: dict[str, Any], name: str, axes: dict[str, int]) -> None:
    """Asserts that the plan has the memory that the save of the first host would compute."""
    plan = planning.on_topology(state, name, axes=axes)
    mesh = topology.mesh(devices(name), axes)
    leaves = [
        jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, fsdp_and_tp(leaf.shape, axes))
        )
        for leaf in state.values()
    ]
    needed = plan_snapshot(list(state), leaves, "auto").needed("copy", leaves)
    assert needed is not None
    assert needed.devices.keys() == set(one_host(devices(name)))
    assert set(needed.devices.values()) == {plan.copy_bytes}
    offloaded = offload.needed_to_offload(dict(zip(state, leaves, strict=True)))
    full = planning.on_topology(state, name, axes=axes, training_bytes=plan.free_bytes)
    assert full.snapshot == "offload"
    assert full.offload_host_bytes is not None
    # Several chips of a host hold some leaves alike, which its save offloads only once.
    assert 0.5 * full.offload_host_bytes < offloaded.host_bytes <= full.offload_host_bytes
    assert not any(offloaded.devices.values())


@pytest.mark.parametrize("chip", CHIPS)
def test_a_chip_has_the_memory_that_is_stated(chip: str) -> None:
    found, *others = devices(ONE_HOST[chip])
    assert len(others) == 3  # one device per chip
    usable_bytes = CHIPS[chip].usable_bytes

    def fits(num_bytes: int) -> bool:
        spec = ((num_bytes,), jnp.dtype(jnp.uint8))
        program = device_programs.zeros_program((spec,), SingleDeviceSharding(found))
        try:
            program.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            if not is_exhausted(error):
                raise
            return False
        return True

    assert fits(usable_bytes)
    assert not fits(usable_bytes + (1 << 20))
    assert 0.94 * CHIPS[chip].hbm_bytes < usable_bytes < 1.01 * CHIPS[chip].hbm_bytes


def test_many_hosts_are_planned_as_their_saves_compute() -> None:
    state = adamw({f"layers.{i}.weight": (64, 64, 3) for i in range(3)} | {"norm": (40,)})
    assert_plans_like_a_save(state, "v5e:2x4", {"fsdp": 4, "tp": 2})
    assert_plans_like_a_save(state, "v5e:2x2", {"fsdp": 4})  # one host


def test_tiles_are_counted() -> None:
    state = {"leaf": jax.ShapeDtypeStruct((64, 32, 32), jnp.float32)}
    plan = planning.on_topology(state, "v5e:2x4")
    assert plan.chip_elements_bytes == 8 * 32 * 32 * 4
    assert plan.chip_bytes == plan.copy_bytes == 4 * plan.chip_elements_bytes
    assert (plan.num_hosts, plan.chips_per_host, plan.snapshot) == (2, 4, "copy")
    plan = planning.on_topology(state, "v6e:2x4", num_slices=2)
    assert (plan.axes, plan.num_chips, plan.num_hosts) == ({"slice": 2, "fsdp": 8}, 16, 4)
    assert plan.chip_elements_bytes == 8 * 32 * 32 * 4  # slices hold replicas


@pytest.mark.parametrize("length", [1 << 30, 1 << 34])
def test_a_state_that_no_chip_holds(length: int) -> None:
    """Whether the compiler accepts one array of its shape or not."""
    state = {f"{i}": jax.ShapeDtypeStruct((8, length), jnp.float32) for i in range(5)}
    plan = planning.on_topology(state, "v5e:2x4")
    assert not plan.fits
    assert plan.free_bytes == CHIPS["v5e"].usable_bytes - 5 * 4 * length
    factor = 2 ** math.ceil(math.log2(20 * length / CHIPS["v5e"].usable_bytes))
    assert plan.advice.startswith(f"shard it over {factor} times as many chips")


def test_copies_that_the_compiler_refuses() -> None:
    state = {"leaf": jax.ShapeDtypeStruct((8, 10 << 28), jnp.float32)}  # 10 of 15.75 GiB
    state["empty"] = jax.ShapeDtypeStruct((8, 0), jnp.float32)
    plan = planning.on_topology(state, "v5e:2x4")
    assert (plan.fits, plan.snapshot) == (True, "offload")
    on_host = 2 * 4 * (10 << 30)  # of four chips, in pinned and in ordinary memory
    assert plan.offload_host_bytes == on_host
    host_memory_bytes = on_host * 5 // 4
    for enough, way in ((host_memory_bytes, "offload"), (host_memory_bytes - 4, "transfer")):
        assert planning.on_topology(state, "v5e:2x4", host_memory_bytes=enough).snapshot == way
    assert plan.copy_bytes is plan.wanted_bytes is None
    assert plan.chip_bytes == 10 << 30


def test_a_topology_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PlanError, match=r"libtpu does not know 'v5e:3x5'.*chips_per_host_bounds"):
        topology.devices("v5e:3x5")


@pytest.mark.skipif("ALLOW_MULTIPLE_LIBTPU_LOAD" in os.environ, reason="libtpu takes no lock")
def test_a_program_that_has_loaded_libtpu_keeps_others_out() -> None:
    devices("v5e:2x2")
    program = (
        "from torchax_ckpt.planning import topology\n"
        "try:\n    topology.devices('v5e:2x2')\n"
        "except topology.PlanError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.startswith("libtpu is in use: another program on this machine")
