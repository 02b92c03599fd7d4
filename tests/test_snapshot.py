"""Snapshots: what a save holds on to, and that donation never makes a wrong checkpoint."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
from torchax_ckpt.errors import SaveError
from torchax_ckpt.snapshot import Snapshot, Snapshotter, free_device_bytes
from torchax_ckpt.storage import arrays as storage

double = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0)
fresh = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree))


def start() -> dict[str, jax.Array]:
    return {f"layers.{i}.w": jnp.full((64, 64), float(i + 1)) for i in range(3)}


def run(directory: Path, step_fn: Any, options: CheckpointOptions, steps: int = 8) -> None:
    """Trains, saves every step, and checks that every one holds what was there then."""
    state = start()
    with TorchaxCheckpointer(
        directory, options=options, preservation_policy=policies.PreserveAll()
    ) as ckpt:
        for step in range(1, steps + 1):
            state = step_fn(state)
            ckpt.save(step, state=state, force=True)
        ckpt.wait_until_finished()
    assert ckpt.all_steps() == list(range(1, steps + 1))
    for step in ckpt.all_steps():
        loaded = ckpt.load(step)
        for name, first in start().items():
            assert np.array_equal(loaded[name], np.asarray(first) * np.float32(2.0**step))


@pytest.mark.parametrize("layout", ["auto", "flat"])
@pytest.mark.parametrize("mode", ["auto", "copy", "transfer"])
def test_donated_buffers_are_saved_as_they_were(mode: Any, layout: Any, directory: Path) -> None:
    options = CheckpointOptions(snapshot=mode, layout=layout)
    run(directory, double, options)


@pytest.mark.parametrize("mode", ["auto", "reference", "copy", "transfer"])
def test_buffers_that_are_not_donated_are_saved_in_every_way(mode: Any, directory: Path) -> None:
    run(directory, fresh, CheckpointOptions(snapshot=mode))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing waits until it is let go, so that whatever it reads by reference may be gone."""
    go = threading.Event()
    write = storage.write_step

    def wait(*args: Any, **kwargs: Any) -> None:
        assert go.wait(60)
        write(*args, **kwargs)

    monkeypatch.setattr(storage, "write_step", wait)
    yield go
    go.set()


@pytest.mark.parametrize("layout", ["flat", "stacked"])
def test_a_deleted_reference_fails_that_save_by_name(
    layout: Any, directory: Path, slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layout == "stacked":
        # A stack is made when the save's thread gets to it: here, after the deletion.
        stored = Snapshot.stored
        monkeypatch.setattr(Snapshot, "stored", lambda self: slow.wait(60) and stored(self))
    options = CheckpointOptions(snapshot="reference", layout=layout)
    state = start()
    ckpt = TorchaxCheckpointer(directory, options=options)
    ckpt.save(1, state=state)
    state["layers.1.w"].delete()
    slow.set()
    with pytest.raises(SaveError, match=r"state/layers\.1\.w: its buffer was donated") as caught:
        ckpt.wait_until_finished()
    assert caught.value.key_path == "state/layers.1.w"
    assert ckpt.all_steps() == []
    assert ckpt.save(1, state=start(), force=True)
    ckpt.wait_until_finished()
    assert ckpt.all_steps() == [1]


def test_auto_notices_donation_without_losing_a_save(caplog: pytest.LogCaptureFixture) -> None:
    snapshotter = Snapshotter("auto", "auto")
    with caplog.at_level(logging.INFO, logger="torchax_ckpt"):
        state = start()
        names = [f"state/{n}" for n in state]
        ways = []
        for _ in range(3):
            ways.append(snapshotter.take(names, list(state.values())).way)
            state = double(state)
    assert ways == ["copy", "copy", "copy"]
    assert caplog.text.count("snapshots are taken by copy: the program donates") == 1


def test_auto_goes_on_with_references_if_nothing_was_donated_and_back_if_it_is() -> None:
    snapshotter = Snapshotter("auto", "auto")
    state = start()
    names = [f"state/{n}" for n in state]
    ways = []
    for _ in range(3):
        ways.append(snapshotter.take(names, list(state.values())).way)
        state = fresh(state)
    snapshotter.donated()
    ways.append(snapshotter.take(names, list(state.values())).way)
    assert ways == ["copy", "reference", "reference", "copy"]


def test_auto_transfers_where_memory_does_not_hold_copies(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = sum(x.nbytes for x in start().values())
    snapshotter = Snapshotter("auto", "auto", free_bytes=lambda device: size // 2)
    state = start()
    names = [f"state/{n}" for n in state]
    assert snapshotter.take(names, list(state.values())).way == "transfer"
    double(state)
    with caplog.at_level(logging.INFO, logger="torchax_ckpt"):
        assert snapshotter.take(names, list(start().values())).way == "transfer"
    assert "no memory for copies" in caplog.text


def test_free_memory_is_known_here() -> None:
    free = free_device_bytes(jax.devices()[0])
    assert free is not None
    assert free > 2**20


def test_a_transfer_holds_the_training_thread_until_everything_is_fetched(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    write = storage.write_step

    def noted(*args: Any, on_transferred: Any, **kwargs: Any) -> None:
        def transferred() -> None:
            order.append("transferred")
            on_transferred()

        write(*args, on_transferred=transferred, **kwargs)

    monkeypatch.setattr(storage, "write_step", noted)
    with TorchaxCheckpointer(directory, options=CheckpointOptions(snapshot="transfer")) as ckpt:
        ckpt.save(1, state=start())
        order.append("returned")
    assert order == ["transferred", "returned"]


def test_a_failed_transfer_does_not_hang(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(storage, "write_step", fail)
    ckpt = TorchaxCheckpointer(directory, options=CheckpointOptions(snapshot="transfer"))
    assert ckpt.save(1, state=start())
    with pytest.raises(SaveError):
        ckpt.close()


@pytest.mark.parametrize(
    "bad", [{"snapshot": "lazy"}, {"layout": "deep"}, {"compression": 1}, {"max_host_bytes": 0}]
)
def test_options_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(bad))):
        CheckpointOptions(**bad)


@pytest.mark.parametrize("options", [{"compression": True}, {"max_host_bytes": 1 << 20}])
def test_compression_and_memory_bounds_change_no_bit(
    options: dict[str, Any], directory: Path
) -> None:
    state = {"x": jnp.arange(1 << 19, dtype=jnp.float32), "y": jnp.ones((512, 512))}
    with TorchaxCheckpointer(directory, options=CheckpointOptions(**options)) as ckpt:
        ckpt.save(1, state=state)
    loaded = TorchaxCheckpointer(directory, options=CheckpointOptions(**options)).load()
    assert all(np.array_equal(loaded[k], state[k]) for k in state)
