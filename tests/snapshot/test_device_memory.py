"""Memory for copies: on devices whose peak never falls, and where there is none left."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding
from support import PROGRAMS
from support.device_memory import donated, exhausted
from support.live import Together
from support.training import P, fsdp_mesh

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.devices.device_memory import DeviceMemory
from torchax_ckpt.devices.device_sizes import Needed, bytes_on_devices, padded_bytes
from torchax_ckpt.errors import OutOfMemoryError
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.runtime.jax_versions import Tiles
from torchax_ckpt.snapshot import planner, snapshotter, stacking
from torchax_ckpt.snapshot.planner import Planner
from torchax_ckpt.snapshot.snapshotter import Snapshot, Snapshotter, way_if_donated
from torchax_ckpt.snapshot.stacking import execute, needed_to_execute

NAMES = [f"state/layers.{i}.w" for i in range(5)]
UNIT = 1 << 12
"""Bytes that an array takes of each device; five are the state."""


def start() -> dict[str, jax.Array]:
    rows = NamedSharding(fsdp_mesh(), P("fsdp"))
    ones = np.ones((8, UNIT // 4), np.float32)
    return {
        name.removeprefix("state/"): jax.device_put(ones * i, rows) for i, name in enumerate(NAMES)
    }


class Accelerator:
    """Accounts as devices with 16 units of memory would, whose program has 5 and a step takes 9."""

    def __init__(self, limit: int = 16, peak: int = 9, unit: int = UNIT) -> None:
        self.limit, self.in_use, self.peak, self.unit = limit, 5, peak, unit
        self.copied: list[weakref.ref[Any]] = []
        self.need = peak
        """The most that the program has had by itself where a device can show it."""

    @property
    def num_copied(self) -> int:
        """Units of copies that are there."""
        copies = [copy for ref in self.copied if (copy := ref()) is not None]
        return sum(copy.addressable_shards[0].data.nbytes for copy in copies) // self.unit

    def step(self, units: int) -> None:
        """The program has so much for a moment."""
        there = self.num_copied
        if there or units + there > self.peak:
            self.need = max(self.need, units)
        self.peak = max(self.peak, units + there)

    def __call__(self, device: jax.Device) -> Mapping[str, int]:
        return {
            "bytes_limit": self.limit * self.unit,
            "bytes_in_use": (self.in_use + self.num_copied) * self.unit,
            "peak_bytes_in_use": self.peak * self.unit,
        }


class Watched(DeviceMemory):
    """Has the accelerator account for copies as they are made."""

    def __init__(self, accelerator: Accelerator, host_bytes: int = 0) -> None:
        super().__init__(accelerator, lambda: host_bytes)
        self._accelerator = accelerator

    def record_copies(self, copies: Iterable[Any]) -> None:
        made = [copy for copy in copies if isinstance(copy, jax.Array)]
        self._accelerator.copied += map(weakref.ref, made)
        self._accelerator.step(self._accelerator.in_use)
        super().record_copies(made)


def take(snapshotter: Snapshotter) -> Snapshot:
    return donated(snapshotter, start())


@pytest.mark.parametrize("layout", ["auto", "flat"])
def test_a_peak_that_holds_the_own_copies_does_not_keep_from_copying(
    layout: Any, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator()
    ckpt = TorchaxCheckpointer(directory, options=CheckpointOptions(layout=layout))
    ckpt._run.snapshotter = Snapshotter("auto", layout, Watched(accelerator))
    with ckpt, caplog.at_level(logging.DEBUG, logger="torchax_ckpt"):
        for step in range(1, 5):
            state = start()
            assert ckpt.save(step, state=state, force=True)
            accelerator.step(9)
            for array in state.values():
                array.delete()
    assert "taken by copy: the program donates" in caplog.text
    assert "taken by transfer" not in caplog.text


@pytest.mark.parametrize(("padding", "way"), [(1, "copy"), (2, "transfer")])
def test_copies_count_as_large_as_the_compiled_programs_make_them(
    padding: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def padded(*args: Any, **kwargs: Any) -> Needed:
        needed = stacking.needed_to_execute(*args, **kwargs)
        return dataclasses.replace(
            needed, devices={device: n * padding for device, n in needed.devices.items()}
        )

    monkeypatch.setattr(planner, "needed_to_execute", padded)
    assert take(Snapshotter("auto", "auto", Watched(Accelerator()))).way == way


operations = st.one_of(
    st.tuples(st.sampled_from(["copy", "step", "hold", "fits"]), st.integers(1, 24)),
    st.tuples(st.just("free"), st.integers(0, 3)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(operations, max_size=25), st.integers(16, 64))
def test_copies_never_take_what_the_program_is_known_to_need(
    done: list[tuple[str, int]], limit: int
) -> None:
    accelerator = Accelerator(limit=limit, unit=4)
    memory = Watched(accelerator)
    memory.holds(bytes_on_devices([jnp.zeros(1)]))
    copies: list[jax.Array] = []
    for what, units in done:
        if what == "copy":
            copies.append(jnp.zeros(units))
            memory.record_copies(copies[-1:])
        elif what == "free" and copies:
            del copies[units % len(copies)]
        elif what == "step":
            accelerator.step(units)
        elif what == "hold":
            accelerator.step(units)
            accelerator.in_use = units
        fits = memory.holds(bytes_on_devices([jnp.zeros(units or 1)]))
        accelerator.need = max(accelerator.need, accelerator.in_use)
        there, peak = accelerator.num_copied, accelerator.peak
        assert not fits or accelerator.need + there + units <= limit
        assert fits or 1.25 * (units or 1) > limit - peak - there, "less than beside the peak"


def test_after_memory_was_exhausted_the_whole_peak_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator()
    snapshotter = Snapshotter("auto", "flat", Watched(accelerator))
    held = take(snapshotter)
    accelerator.step(9)
    assert held.way == "copy"
    del held
    with monkeypatch.context() as patch, caplog.at_level(logging.DEBUG, logger="torchax_ckpt"):
        patch.setattr(stacking, "copy_program", exhausted)
        assert take(snapshotter).way == "transfer"
    assert "taken by transfer: the program donates" in caplog.text
    assert take(snapshotter).way == "transfer"


@pytest.mark.parametrize("layout", ["flat", "auto"])
def test_copies_that_do_not_fit_are_said_and_change_nothing(
    layout: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = start()
    content = {name: np.asarray(array).tobytes() for name, array in state.items()}
    needed = sum(array.nbytes for array in state.values()) // len(jax.devices())
    ckpt = TorchaxCheckpointer(directory, options=CheckpointOptions(layout=layout))
    ckpt._run.snapshotter = Snapshotter("copy", layout, DeviceMemory(Accelerator(peak=15)))
    with ckpt:
        ckpt.save(1, state=state, force=True)
        with monkeypatch.context() as patch:
            patch.setattr(stacking, "copy_program", exhausted)
            patch.setattr(stacking, "stack_program", exhausted)
            said = rf"expected (\d+) bytes free .*found {UNIT} bytes.*snapshot=\"auto\""
            with pytest.raises(OutOfMemoryError, match=said) as caught:
                ckpt.save(2, state=state, force=True)
        found = re.search(said, str(caught.value))
        assert found is not None
        assert needed <= int(found[1]) < needed + 100  # with random state
        assert {n: np.asarray(a).tobytes() for n, a in state.items()} == content
        ckpt.wait_until_finished()
        assert ckpt.all_steps() == [1]
        assert ckpt.save(2, state=state, force=True)
        ckpt.wait_until_finished()
        loaded = ckpt.load(2, state)
    assert {n: np.asarray(a).tobytes() for n, a in loaded.items()} == content


def stacks(directory: Path, step: int) -> dict[str, Any]:
    """The stacks of a step, by name, as its manifest has them."""
    manifest = json.loads((directory / str(step) / "manifest" / "data.json").read_text())
    return manifest["stacks"]


@pytest.mark.parametrize("mode", ["transfer", "reference"])
@pytest.mark.parametrize("how", ["does not fit", "is exhausted", "fits"])
def test_without_memory_for_stacks_they_are_made_on_the_host(
    mode: Any, how: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshotter, "stacks_on_host", lambda arrays: False)
    accelerator = Accelerator(peak=12 if how == "does not fit" else 9)
    if how == "is exhausted":
        monkeypatch.setattr(stacking, "stack_program", exhausted)
    make = mock.Mock(wraps=stacking.LateParts.of)
    monkeypatch.setattr(stacking.LateParts, "of", make)
    ckpt = TorchaxCheckpointer(directory)
    ckpt._run.snapshotter = Snapshotter(mode, "auto", DeviceMemory(accelerator))
    state: dict[str, Any] = {**start(), "counters": {str(i): np.int64(i) for i in range(3)}}
    with ckpt:
        ckpt.save(1, state=state)
    named = stacks(directory, 1)
    assert any("layers" in name for name in named)
    assert any("host_scalars" in name for name in named)
    assert make.called == (how != "fits")
    loaded = ckpt.load(1, state)
    for name, array in start().items():
        assert loaded[name].sharding == array.sharding
        assert np.array_equal(loaded[name], array)
    assert loaded["counters"] == state["counters"]


ONE_GIB = 1 << 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "fulls", "host_bytes"),
    [
        ("reference", [None, 1, 0, None], 0),
        pytest.param("transfer", [1, None, 0], 0, marks=pytest.mark.long),
        ("auto", [None, None, 1, 1, 0], 0),
        ("auto", [None, 1, 0, None], ONE_GIB),  # one offloads while others copy
        ("offload", [None, 1, 0], ONE_GIB),
    ],
)
def test_a_process_without_memory_costs_no_save(
    mode: str, fulls: list[int | None], host_bytes: int, together: Together, directory: Path
) -> None:
    """``fulls`` are the processes whose devices have no memory at each step."""
    arguments = directory, mode, host_bytes, json.dumps(fulls)
    told = together(PROGRAMS / "arrays_on_processes.py", 2, "full_devices", *arguments)
    steps = list(range(1, len(fulls) + 1))
    for (report,) in told:
        assert (report["failed"], report["steps"]) == ({}, steps)
        values = [float(step * i) for step in steps for _ in range(2) for i in range(5)]
        assert report["means"] == [[value] * 2 for value in values]
    assert all("layers.*.w" in "".join(stacks(directory, step)) for step in steps)


# --- sizes of arrays on devices ---

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
    layout = Tiles(order, tiling, num_bits)
    assert padded_bytes(shape, jnp.dtype(dtype), layout) == expected


def test_live_arrays_count_on_each_of_their_devices_but_not_in_host_memory() -> None:
    sharded = jax.device_put(np.zeros((16, 4), np.float32), ROWS)
    whole = jax.device_put(np.zeros(3, np.int8), SingleDeviceSharding(jax.devices()[1]))
    pinned = jax.device_put(sharded, ROWS.with_memory_kind("pinned_host"))
    first, second, *others = jax.devices()
    found = bytes_on_devices([sharded, whole, pinned, np.zeros(5), 3])
    assert found == {first: 32, second: 35, **dict.fromkeys(others, 32)}


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
def test_copies_of_arrays_on_several_processes_count_on_each_device_once(
    together: Together,
) -> None:
    for (told,) in together(PROGRAMS / "arrays_on_processes.py", 2, "sizes"):
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
    assert "no memory of devices" in DeviceMemory().shortage(needed)
