"""Offloading: the state goes to the host in the background, and device memory is left as it is."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from support import PROGRAMS
from support.compare import assert_trees_identical
from support.device_memory import donated, exhausted, limited
from support.jax_releases import set_mesh
from support.live import Together
from support.processes import run_python
from support.strategies import JAX_DTYPES
from support.training import P, fsdp_mesh

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.devices.device_memory import DeviceMemory
from torchax_ckpt.devices.host_array import HostArray
from torchax_ckpt.errors import OutOfMemoryError, SaveError
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.snapshot import offload, stacking
from torchax_ckpt.snapshot.offload import Offloaded, needed_to_offload
from torchax_ckpt.snapshot.snapshotter import Snapshotter

ROWS, WHOLE = NamedSharding(fsdp_mesh(), P("fsdp")), NamedSharding(fsdp_mesh(), P())
ONE = SingleDeviceSharding(jax.devices()[3])


def state_of(seed: int = 0) -> dict[str, Any]:
    """Leaves of every kind: stacked or not, sharded, replicated, on one device, pinned, empty."""
    draw = np.random.default_rng(seed)

    def on(sharding: Any, *shape: int, dtype: Any = "float32") -> jax.Array:
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        content = np.frombuffer(draw.bytes(num_bytes), np.uint8)
        values = content % 2 if dtype == "bool" else content
        return jax.device_put(values.view(dtype).reshape(shape), sharding)

    leaves = {
        **{f"layers.{i}.w": on(ROWS, 16, 48) for i in range(5)},
        **{f"layers.{i}.b": on(WHOLE, 48) for i in range(5)},
        **{f"heads.{i}": on(ONE, 7, 3) for i in range(3)},
        **{f"dtypes.{name}": on(ROWS, 8, 4, dtype=name) for name in JAX_DTYPES if "4" not in name},
        "large": on(WHOLE, 512, 600),  # its shards are taken from one replica
        "pinned": on(ROWS.with_memory_kind("pinned_host"), 8, 3),
        "scalar": on(WHOLE, 1).reshape(()),
        "empty": jax.device_put(np.zeros((0, 4), np.float32), WHOLE),
        "host": np.arange(5),
        "counters": {str(i): np.int64(i) for i in range(3)},
    }
    return dict(sorted(leaves.items()))


def saved(directory: Path, mode: Any, layout: Any = "auto") -> Path:
    options = CheckpointOptions(snapshot=mode, layout=layout)
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        ckpt.save(1, state=state_of())
    return directory / "1"


@pytest.mark.parametrize("layout", ["auto", "flat"])
def test_a_state_of_any_leaves_is_stored_bit_for_bit(layout: Any, directory: Path) -> None:
    saved(directory, "offload", layout)
    assert_trees_identical(TorchaxCheckpointer(directory).load(1, state_of()), state_of())


def test_a_step_does_not_show_how_its_snapshot_was_taken(tmp_path: Path) -> None:
    copied, offloaded = saved(tmp_path / "a", "copy"), saved(tmp_path / "b", "offload")
    for name in ("_METADATA", "_sharding", "array_metadatas/process_0"):
        assert (copied / "state" / name).read_bytes() == (offloaded / "state" / name).read_bytes()
    manifests = [json.loads((at / "manifest/data.json").read_text()) for at in (copied, offloaded)]
    for manifest in manifests:  # without the random state
        digests = manifest["digests"]
        manifest["digests"] = {n: digests[n] for n in digests if n.startswith("state/")}
    assert manifests[0]["digests"] == manifests[1]["digests"]
    assert manifests[0]["stacks"] == manifests[1]["stacks"]


def offloaded(leaves: dict[str, jax.Array], **stacks: tuple[str, ...]) -> Offloaded:
    return Offloaded(Plan(stacks), leaves, DeviceMemory(), needed_to_offload(leaves))


def test_threads_of_several_saves_share_what_was_offloaded() -> None:
    leaves = {"w": jax.device_put(np.arange(64, dtype=np.float32), ROWS)}
    taken = offloaded(leaves)
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: taken.fetched(), range(4))]
    assert all(one is found[0] for one in found)
    assert np.array_equal(np.asarray(found[0]["w"]), np.arange(64))


@pytest.mark.parametrize("error", ["the device failed", "RESOURCE_EXHAUSTED: out of memory"])
def test_a_failed_computation_fails_the_save_and_nothing_else(
    error: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows only on the thread of the save."""

    def fails(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError(error)

    ckpt = TorchaxCheckpointer(directory)
    ckpt._run.snapshotter = Snapshotter("auto", "flat", limited(0, 1 << 40))
    ckpt._run.snapshotter.donated()
    with monkeypatch.context() as patch:
        patch.setattr(Offloaded, "_copied", fails)
        ckpt.save(1, state=sizes(4), force=True)
        with pytest.raises(SaveError, match=error):
            ckpt.wait_until_finished()
    ckpt.save(2, state=sizes(4), force=True)
    ckpt.close()
    assert ckpt.all_steps() == [2]


@pytest.mark.parametrize("mode", ["copy", "offload", "reference"])
def test_a_mesh_that_the_program_set_does_not_matter(mode: Any, directory: Path) -> None:
    """JAX refuses jitted functions of arrays on other devices within ``jax.set_mesh``."""
    options = CheckpointOptions(snapshot=mode)
    state = {name: value for name, value in state_of().items() if not name.startswith("dtypes")}
    with set_mesh(fsdp_mesh(4)), TorchaxCheckpointer(directory, options=options) as ckpt:
        ckpt.save(1, state=state)
        ckpt.wait_until_finished()
        loaded = ckpt.load(1, state)
    assert_trees_identical(loaded, state)


@pytest.mark.parametrize("layout", ["auto", "flat"])
def test_arrays_that_are_deleted_at_once_are_stored_as_they_were(layout: Any) -> None:
    state = {n: a for n, a in state_of().items() if isinstance(a, jax.Array) and a.size}
    expected = {f"state/{n}": np.array(a) for n, a in state.items()}
    plan, stored = donated(Snapshotter("offload", layout), state).to_store()
    for name, members in plan.members(list(expected)).items():
        found = np.asarray(stored[name])
        rows = found if name in plan.stacks else [found]
        for member, row in zip(members, rows, strict=True):
            assert row.tobytes() == expected[member].tobytes(), member


def sizes(*kib: int) -> dict[str, jax.Array]:
    """Leaves that take so many KiB of each device."""
    return {
        f"w{chr(97 + i)}": jax.device_put(np.full((8, n * 256), i + 1, np.float32), ROWS)
        for i, n in enumerate(kib)
    }


# With the room that is kept free, of each device, and of the host in pinned and ordinary memory.
COPIES, ON_HOST = 16 * 1280, 2 * 8 * 16 * 1280


@pytest.mark.parametrize(
    ("device_bytes", "host_bytes", "way"),
    [
        (COPIES, 0, "copy"),
        (COPIES - 1, ON_HOST, "offload"),  # all: no array is copied, although three would fit
        (0, ON_HOST, "offload"),
        (COPIES - 1, ON_HOST - 1, "transfer"),
    ],
)
def test_auto_copies_everything_or_offloads_everything_or_transfers(
    device_bytes: int, host_bytes: int, way: str
) -> None:
    snapshotter = Snapshotter("auto", "flat", limited(device_bytes, host_bytes))
    state: dict[str, Any] = {**sizes(4, 1, 4, 7), "host": np.arange(5)}
    names = [f"state/{name}" for name in state]
    for _ in range(2):
        snapshotter.donated()
        snapshot = snapshotter.take(names, list(state.values()))
        assert snapshot.way == way
        _, stored = snapshot.to_store()
        assert [*stored] == names
        for array, expected in zip(stored.values(), state.values(), strict=True):
            is_offloaded = way == "offload" and isinstance(expected, jax.Array)
            assert isinstance(array, HostArray) == is_offloaded
            assert np.array_equal(np.asarray(array), expected)
        del snapshot, stored, array


def test_offloads_in_flight_count_until_they_have_their_memory() -> None:
    needed = 2 * 8 * 16 * 1024 * 5 // 4
    memory = limited(0, needed)
    taken = Snapshotter("auto", "flat", memory)
    taken.donated()
    first = taken.take([*sizes(16)], [*sizes(16).values()])
    assert (first.way, taken.take([*sizes(16)], [*sizes(16).values()]).way) == (
        "offload",
        "transfer",
    )
    del first  # as a save that failed before it fetched the arrays
    assert taken.take([*sizes(16)], [*sizes(16).values()]).way == "offload"


def test_pinned_memory_that_a_runtime_has_kept_does_not_count_twice() -> None:
    once = 8 * 16 * 1024 * 5 // 4
    available = 2 * once
    taken = Snapshotter("offload", "flat", DeviceMemory(host_bytes=lambda: available))
    taken.take([*sizes(16)], [*sizes(16).values()]).to_store()
    available = once  # the runtime has kept the pinned memory
    taken.take([*sizes(16)], [*sizes(16).values()]).to_store()
    available = once - 1
    with pytest.raises(OutOfMemoryError):
        taken.take([*sizes(16)], [*sizes(16).values()])


def test_auto_offloads_when_copies_exhaust_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacking, "copy_program", exhausted)
    for host_bytes, way in [(1 << 30, "offload"), (0, "transfer")]:
        taken = Snapshotter("auto", "flat", limited(1 << 30, host_bytes))
        assert donated(taken, sizes(16)).way == way


def test_a_host_that_is_too_small_is_said_and_nothing_changes(directory: Path) -> None:
    ckpt = TorchaxCheckpointer(directory, options=CheckpointOptions(snapshot="offload"))
    ckpt._run.snapshotter = Snapshotter("offload", "auto", limited(1 << 40, 1000))
    state = state_of()
    said = r"expected \d+ bytes of host memory available, found 1000 bytes.*snapshot=\"transfer\""
    with pytest.raises(OutOfMemoryError, match=said):
        ckpt.save(1, state=state, force=True)
    assert_trees_identical(state, state_of())
    ckpt.close()
    assert ckpt.all_steps() == []


def test_devices_without_pinned_memory_are_said(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "PINNED", "none_such")
    ckpt = TorchaxCheckpointer(directory, options=CheckpointOptions(snapshot="offload"))
    with pytest.raises(SaveError, match="devices that can copy to memory of the kind"):
        ckpt.save(1, state=state_of(), force=True)
    ckpt.close()
    taken = Snapshotter("auto", "flat", limited(0, 1 << 30))
    assert taken.take([*sizes(16)], [*sizes(16).values()]).way == "transfer"


def test_devices_whose_programs_cannot_write_to_pinned_memory_are_not_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the CPU devices of jaxlib 0.7, which say that they have it."""

    def refused(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("NOT_FOUND: annotate_device_placement for Host")

    monkeypatch.setattr(offload, "offload_program", lambda sharding: refused)
    monkeypatch.setattr(offload, "_can_offload", offload._can_offload.__wrapped__)
    taken = Snapshotter("auto", "flat", limited(0, 1 << 30))
    assert taken.take([*sizes(16)], [*sizes(16).values()]).way == "transfer"
    assert "cannot copy to the host by themselves: NOT_FOUND: annotate" in caplog.text


@pytest.mark.slow
def test_many_saves_leave_no_host_memory_behind(tmp_path: Path) -> None:
    # What is freed goes back to the system at once: what malloc keeps differs from run to run.
    env = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    arguments = PROGRAMS / "memory.py", "of_offload", str(tmp_path), "30", "200"
    told = run_python(*arguments, devices=4, env=env, fresh=True)
    after_few, after_all, num_bytes = map(int, told.stdout.split())
    assert num_bytes >= 200_000_000
    assert after_all <= after_few * 1.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        ("offload", "auto"),
        ("copy", "flat"),
        pytest.param("offload", "flat", marks=pytest.mark.long),
        pytest.param("copy", "auto", marks=pytest.mark.long),
    ],
)
def test_processes_store_what_each_of_them_has(
    layout: str, mode: str, together: Together, tmp_path: Path
) -> None:
    program = PROGRAMS / "arrays_on_processes.py"
    told = together(program, 2, "two_tiers", tmp_path, mode, layout)
    assert [report["different"] for (report,) in told] == [[], []]
