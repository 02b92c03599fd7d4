"""When array data is compressed: as asked for, or once the medium proves slow."""

from __future__ import annotations

import logging
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support.training import P, fsdp_mesh

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.storage.arrays import compression, host_batches
from torchax_ckpt.storage.arrays.compression import SLOW_BYTES_PER_SEC, Compression

MANY = 100 << 20


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        told = types.SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(compression, "time", told)


@pytest.mark.parametrize("asked", [True, False])
def test_what_is_asked_for_stays(asked: bool) -> None:
    compression = Compression(asked)
    for _ in range(5):
        compression.observe(MANY, 1, 3600 if not asked else 1e-9)
    assert compression.is_on == asked


def test_it_begins_with_the_third_save_in_a_row_on_a_slow_medium(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    compression = Compression(None)
    slow, fast = MANY / SLOW_BYTES_PER_SEC * 1.1, MANY / SLOW_BYTES_PER_SEC * 0.9
    for secs, is_on in ((fast, False), (slow, False), (fast, False), (slow, True)):
        compression.observe(MANY, 1, secs)
        assert compression.is_on == is_on
    assert "compressed from now on" in caplog.text


def test_small_saves_say_nothing_about_the_medium() -> None:
    compression = Compression(None)
    for _ in range(10):
        compression.observe(1 << 20, 1, 60.0)
    assert not compression.is_on


def test_many_small_arrays_say_nothing_about_the_medium() -> None:
    compression = Compression(None)
    for _ in range(10):
        compression.observe(MANY, 1000, 60.0)
    assert not compression.is_on


def test_replicas_are_not_counted(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros((8, 4096), np.uint8)
    state = {
        "sharded": jax.device_put(x, NamedSharding(fsdp_mesh(), P("fsdp"))),
        "replicated": jax.device_put(x, NamedSharding(fsdp_mesh(), P())),
        "host": x,
    }
    observed: list[Any] = []
    monkeypatch.setattr(Compression, "observe", lambda self, *args: observed.append(args))
    with TorchaxCheckpointer(directory, options=CheckpointOptions(layout="flat")) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state={"x": x} if step == 1 else {"x": x, **state}, force=True)
    (fewer, few, _), (more, many, _) = observed
    assert (more - fewer, many - few) == (3 * x.nbytes, 3)


def test_a_run_on_a_slow_medium_ends_up_compressed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "_MIN_BYTES", 1)
    monkeypatch.setattr(compression, "_MIN_MEAN_BYTES", 1)
    monkeypatch.setattr(compression, "SLOW_BYTES_PER_SEC", 1e12)
    state = {"w": jnp.zeros((512, 512))}

    def size(step: int) -> int:
        return sum(f.stat().st_size for f in (directory / str(step)).rglob("*") if f.is_file())

    with TorchaxCheckpointer(directory, options=CheckpointOptions()) as ckpt:
        sizes: list[Any] = []
        for step in range(1, 5):
            ckpt.save(step, state=state, force=True)
            ckpt.wait_until_finished()
            sizes.append(size(step))
        assert min(sizes[:3]) > state["w"].nbytes
        assert sizes[3] < state["w"].nbytes / 10
        for step in (2, 4):
            assert np.array_equal(ckpt.load(step)["w"], state["w"])


def test_the_time_in_which_arrays_are_written_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    compression = Compression(None)
    for _ in range(3):
        assert not compression.is_on
        compression.begin(MANY)
        clock.now += MANY / SLOW_BYTES_PER_SEC * 1.05
        compression.end(1)
    assert compression.is_on


def test_the_time_in_which_arrays_come_from_the_devices_does_not_count(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(compression, "_MIN_BYTES", 1)
    monkeypatch.setattr(compression, "_MIN_MEAN_BYTES", 1)
    start = host_batches._start

    def an_hour_later(array: Any) -> Any:
        fetch = start(array)

        def slowly() -> Any:
            clock.now += 3600
            return fetch()

        return slowly

    monkeypatch.setattr(host_batches, "_start", an_hour_later)
    with TorchaxCheckpointer(directory) as ckpt:
        for step in range(1, 5):
            ckpt.save(step, state={"w": jnp.zeros((512, 512))}, force=True)
        ckpt.wait_until_finished()
        chosen = ckpt._saver._writer._compression
    assert clock.now >= 4 * 3600
    assert len(chosen._rates) == 3
    assert not chosen.is_on


def test_several_processes_compress_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    compression = Compression(None)
    for _ in range(5):
        compression.observe(MANY, 1, 3600)
    assert not compression.is_on
