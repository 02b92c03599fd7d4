"""Memory for copies: on devices whose peak never falls, and where there is none left."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support import P, fsdp_mesh, run_processes

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, snapshot
from torchax_ckpt.device_memory import DeviceMemory, free_device_bytes
from torchax_ckpt.errors import OutOfMemoryError
from torchax_ckpt.snapshot import Snapshot, Snapshotter

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
    """Says what devices with 16 units of memory would, where a step takes 9."""

    def __init__(self, limit: int = 16, peak: int = 9) -> None:
        self.limit, self.peak = limit, peak

    def __call__(self, device: jax.Device) -> Mapping[str, int]:
        return {
            "bytes_limit": self.limit * UNIT,
            "bytes_in_use": 5 * UNIT,
            "peak_bytes_in_use": self.peak * UNIT,
        }


def take(snapshotter: Snapshotter) -> Snapshot:
    """As of a program that donates."""
    state = start()
    taken = snapshotter.take(NAMES, list(state.values()))
    for array in state.values():
        array.delete()
    return taken


def test_free_memory_is_known_here() -> None:
    free = free_device_bytes(jax.devices()[0])
    assert free is not None
    assert free > 2**20


@pytest.mark.parametrize("layout", ["auto", "flat"])
def test_a_peak_that_holds_the_own_copies_does_not_keep_from_copying(
    layout: Any, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator()
    ckpt = TorchaxCheckpointer(directory, options=CheckpointOptions(layout=layout))
    ckpt._snapshotter = Snapshotter("auto", layout, DeviceMemory(accelerator))
    with ckpt, caplog.at_level(logging.INFO, logger="torchax_ckpt"):
        for step in range(1, 5):
            state = start()
            assert ckpt.save(step, state=state, force=True)
            accelerator.peak = 9 + 5
            for array in state.values():
                array.delete()
    assert "taken by copy: the program donates" in caplog.text
    assert "taken by transfer" not in caplog.text


def test_copies_of_another_save_that_are_still_there_count() -> None:
    accelerator = Accelerator()
    snapshotter = Snapshotter("auto", "auto", DeviceMemory(accelerator))
    held = take(snapshotter)
    accelerator.peak = 9 + 5
    assert (held.way, take(snapshotter).way) == ("copy", "transfer")
    del held
    assert take(snapshotter).way == "copy"


@pytest.mark.parametrize(("peak", "way"), [(9 + 5, "copy"), (10 + 5, "transfer"), (16, "transfer")])
def test_what_the_program_itself_comes_to_need_counts(peak: int, way: str) -> None:
    accelerator = Accelerator()
    snapshotter = Snapshotter("auto", "auto", DeviceMemory(accelerator))
    assert take(snapshotter).way == "copy"
    accelerator.peak = peak
    assert [take(snapshotter).way for _ in range(3)] == [way] * 3


def test_after_memory_was_exhausted_the_whole_peak_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator()
    snapshotter = Snapshotter("auto", "flat", DeviceMemory(accelerator))
    assert take(snapshotter).way == "copy"
    accelerator.peak = 9 + 5
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, logger="torchax_ckpt"):
        patch.setattr(snapshot, "_copy_onto", exhausted)
        assert take(snapshotter).way == "transfer"
    assert "taken by transfer: the devices ran out of memory" in caplog.text
    assert take(snapshotter).way == "transfer"


def exhausted(*_: Any) -> Any:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")


@pytest.mark.parametrize("layout", ["flat", "stacked"])
def test_copies_that_do_not_fit_are_said_and_change_nothing(
    layout: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = start()
    content = {name: np.asarray(array).tobytes() for name, array in state.items()}
    needed = sum(array.nbytes for array in state.values()) // len(jax.devices())
    ckpt = TorchaxCheckpointer(directory, options=CheckpointOptions(layout=layout))
    ckpt._snapshotter = Snapshotter("copy", layout, DeviceMemory(Accelerator(peak=15)))
    with ckpt:
        ckpt.save(1, state=state, force=True)
        with monkeypatch.context() as patch:
            patch.setattr(snapshot, "_copy_onto", exhausted)
            patch.setattr(snapshot, "_stack_onto", exhausted)
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
def test_without_memory_for_stacks_leaves_are_stored_one_by_one(
    mode: Any, how: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = Accelerator(peak=12 if how == "does not fit" else 9)
    if how == "is exhausted":
        monkeypatch.setattr(snapshot, "_stack_onto", exhausted)
    ckpt = TorchaxCheckpointer(directory)
    ckpt._snapshotter = Snapshotter(mode, "auto", DeviceMemory(accelerator))
    state: dict[str, Any] = {**start(), "counters": {str(i): np.int64(i) for i in range(3)}}
    with ckpt:
        ckpt.save(1, state=state)
    named = stacks(directory, 1)
    assert any("layers" in name for name in named) == (how == "fits")
    assert any("host_scalars" in name for name in named)  # which take no memory of devices
    loaded = ckpt.load(1, state)
    for name, array in start().items():
        assert loaded[name].sharding == array.sharding
        assert np.array_equal(loaded[name], array)
    assert loaded["counters"] == state["counters"]


ONE_IS_FULL = """
    import sys
    import numpy as np
    import jax
    from jax.sharding import NamedSharding, PartitionSpec as P
    from processes_program import INDEX, MESH, report
    from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, errors
    from torchax_ckpt.device_memory import DeviceMemory
    from torchax_ckpt.snapshot import Snapshotter

    directory, mode = sys.argv[4:6]
    rows = NamedSharding(MESH, P("fsdp"))
    ones = np.ones((8, 1024), np.float32)
    state = {f"layers.{i}.w": jax.make_array_from_callback(
        ones.shape, rows, lambda index: ones[index] * i) for i in range(5)}
    limit = {"bytes_limit": 0 if INDEX == 1 else 1 << 40, "bytes_in_use": 0}
    ckpt = TorchaxCheckpointer(directory, options=CheckpointOptions(process_timeout_secs=60))
    ckpt._snapshotter = Snapshotter(
        "copy" if INDEX == 0 and mode == "mixed" else "transfer",
        "auto", DeviceMemory(lambda device: limit))
    ckpt.save(1, state=state)
    try:
        ckpt.close()
    except errors.SaveError as error:
        report(failed=str(error), steps=ckpt.all_steps())
    else:
        loaded = ckpt.load(1, state)
        parts = [np.asarray(s.data) for a in loaded.values() for s in a.addressable_shards]
        report(steps=ckpt.all_steps(), means=[float(p.mean()) for p in parts])
"""


def test_processes_agree_on_storing_leaves_one_by_one(directory: Path) -> None:
    for (report,) in run_processes(ONE_IS_FULL, 2, str(directory), "alike"):
        assert report == {"steps": [1], "means": [i for i in range(5) for _ in range(2)]}
    assert not any("layers" in name for name in stacks(directory, 1))


def test_a_process_that_has_stacked_already_fails_the_save_of_one_that_cannot(
    directory: Path,
) -> None:
    for (report,) in run_processes(ONE_IS_FULL, 2, str(directory), "mixed"):
        assert report["steps"] == []
        assert 'use CheckpointOptions(layout="flat")' in report["failed"]


def test_what_is_free_of_a_host_counts_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a host is given back: what is missing of it is somebody's."""
    free = 7 * 8 * UNIT
    monkeypatch.setattr("torchax_ckpt.device_memory._available_host_bytes", lambda: free)
    memory = DeviceMemory()
    arrays = list(start().values())
    assert memory.holds(arrays)
    copies = [jnp.copy(array) for array in arrays]
    memory.took(copies)
    del copies
    free = 3 * 8 * UNIT
    assert not memory.holds(arrays)
