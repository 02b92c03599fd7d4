"""Sizes of arrays on devices, by the layouts that TPUs and CPUs give them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Layout
from jax.sharding import NamedSharding, SingleDeviceSharding
from support import PROGRAMS
from support.processes import run_processes
from support.training import P, fsdp_mesh

from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.snapshot import stacking
from torchax_ckpt.snapshot.device_memory import DeviceMemory
from torchax_ckpt.snapshot.device_sizes import bytes_on_devices, padded_bytes, shard_bytes
from torchax_ckpt.snapshot.planner import Planner
from torchax_ckpt.snapshot.snapshotter import way_if_donated
from torchax_ckpt.snapshot.stacking import execute, needed_to_execute

ROWS = NamedSharding(fsdp_mesh(), P("fsdp"))


@pytest.mark.parametrize(
    ("shape", "dtype", "order", "tiling", "num_bits", "expected"),
    [
        # As the TPU compiler (v5e) lays arrays out, and the sizes that it reports.
        ((8, 32, 32), "float32", (0, 1, 2), ((8, 128),), 0, 131_072),
        ((128, 32, 32), "float32", (1, 2, 0), ((8, 128),), 0, 524_288),
        ((64, 48), "bfloat16", (0, 1), ((8, 128), (2, 1)), 0, 16_384),
        ((48,), "float32", (0,), ((128,),), 0, 512),
        ((), "float32", (), ((128,),), 0, 512),
        ((300, 7), "int4", (0, 1), ((8, 128), (8, 1)), 4, 19_456),
        # A CPU has no tiles.
        ((300, 7), "float32", (0, 1), (), 0, 8_400),
        ((), "bool", (), (), 0, 1),
    ],
)
def test_a_layout_says_how_many_bytes_a_shard_takes(
    shape: tuple[int, ...],
    dtype: str,
    order: tuple[int, ...],
    tiling: Any,
    num_bits: int,
    expected: int,
) -> None:
    layout = Layout(order, tiling, num_bits)
    assert padded_bytes(shape, jnp.dtype(dtype), layout) == expected


def test_live_arrays_count_on_each_of_their_devices_but_not_in_host_memory() -> None:
    sharded = jax.device_put(np.zeros((16, 4), np.float32), ROWS)
    whole = jax.device_put(np.zeros(3, np.int8), SingleDeviceSharding(jax.devices()[1]))
    pinned = jax.device_put(sharded, ROWS.with_memory_kind("pinned_host"))
    first, second, *others = jax.devices()
    found = bytes_on_devices([sharded, whole, pinned, np.zeros(5), 3])
    assert found == {first: 32, second: 35, **dict.fromkeys(others, 32)}


def test_leaves_to_come_are_as_large_as_their_shards() -> None:
    targets = {
        "rows": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=ROWS),
        "empty": jax.ShapeDtypeStruct((0, 4), jnp.float32, sharding=ROWS),
        "bits": jax.ShapeDtypeStruct(
            (8,), jnp.float8_e8m0fnu, sharding=NamedSharding(fsdp_mesh(), P())
        ),
    }
    assert shard_bytes(targets) == {"rows": 32, "empty": 0, "bits": 8}


@pytest.mark.parametrize("count", [3, 130])
@pytest.mark.parametrize("copy", [True, False])
def test_what_a_plan_takes_is_known_before_it_runs_and_compiled_once(
    count: int, copy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    leaves: dict[str, Any] = {
        f"layers.{i}.w": jax.device_put(np.full((8, 3), i, np.float32), ROWS) for i in range(count)
    }
    leaves |= {"other": jax.device_put(np.zeros((8, 5), np.float32), ROWS), "host": np.zeros(7)}
    plan = Plan({"layers.*.w": tuple(leaves)[:count]}, frozenset())
    needed = needed_to_execute(plan, leaves, copy=copy)
    stack = count * 12 * (2 if count > 128 else 1)  # and its parts, for a moment
    assert needed.devices == dict.fromkeys(jax.devices(), stack + (20 if copy else 0))
    jax.config.update("jax_log_compiles", True)
    try:
        stored = execute(plan, leaves, copy=copy)
    finally:
        jax.config.update("jax_log_compiles", False)
    assert not [m for m in caplog.messages if m.startswith("Compiling")]
    assert np.array_equal(stored["layers.*.w"][:, 0, 0], np.arange(count))
    assert (stored["other"] is leaves["other"]) == (not copy)


@pytest.mark.slow
def test_copies_of_arrays_on_several_processes_count_on_each_device_once() -> None:
    for (told,) in run_processes(PROGRAMS / "arrays_on_processes.py", 2, "sizes"):
        assert told["is_as_predicted"]
        assert told["shards"] == [3] * told["devices"]


def test_a_program_that_no_device_holds_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    class TooLarge:
        def lower(self, *arrays: Any) -> Any:
            compiled.append(arrays)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in hbm")

    monkeypatch.setattr(stacking, "copy_program", lambda sharding: TooLarge())
    leaves = {"w": jax.device_put(np.zeros((8, 3), np.float32), ROWS)}
    planner = Planner("auto")
    for _ in range(3):
        plan = planner(["w"], [leaves["w"]])
        assert plan.needed("copy", [leaves["w"]]) is None
        assert way_if_donated(plan, [leaves["w"]], DeviceMemory()) == "offload"
    assert len(compiled) == 1


def test_a_state_in_host_memory_needs_no_device() -> None:
    pinned = jax.device_put(np.zeros((8, 3), np.float32), ROWS.with_memory_kind("pinned_host"))
    needed = bytes_on_devices([pinned])
    assert DeviceMemory().holds(needed)
    assert "no memory of devices" in DeviceMemory().described(needed)
