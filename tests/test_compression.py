"""When array data is compressed: as asked for, or once the medium proves slow."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support import P, fsdp_mesh

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.storage import compression as room
from torchax_ckpt.storage.compression import SLOW_BYTES_PER_SEC, Compression, stored_bytes

MANY = 100 << 20


@pytest.mark.parametrize("asked", [True, False])
def test_what_is_asked_for_stays(asked: bool) -> None:
    compression = Compression(asked)
    for _ in range(5):
        with compression.observed([np.zeros(4)]):
            pass
    assert compression.is_on == asked


def test_it_begins_with_the_third_save_in_a_row_on_a_slow_medium(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    compression = Compression(None)
    slow, fast = MANY / SLOW_BYTES_PER_SEC * 1.1, MANY / SLOW_BYTES_PER_SEC * 0.9
    for secs, is_on in ((fast, False), (slow, False), (fast, False), (slow, True)):
        compression.observe(MANY, secs)
        assert compression.is_on == is_on
    assert "compressed from now on" in caplog.text


def test_small_saves_say_nothing_about_the_medium() -> None:
    compression = Compression(None)
    for _ in range(10):
        compression.observe(1 << 20, 60.0)
    assert not compression.is_on


def test_replicas_and_other_hosts_shards_are_not_counted() -> None:
    x = np.zeros((16, 8), np.float32)
    sharded, replicated = (
        jax.device_put(x, NamedSharding(fsdp_mesh(), spec)) for spec in (P("fsdp"), P())
    )
    assert stored_bytes([sharded, replicated, x]) == 3 * x.nbytes


def test_a_run_on_a_slow_medium_ends_up_compressed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_LEAST_BYTES", 1)
    monkeypatch.setattr(room, "SLOW_BYTES_PER_SEC", 1e12)
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


def test_the_time_in_which_arrays_are_written_counts() -> None:
    compression = Compression(None)
    array = np.broadcast_to(np.zeros((), np.uint8), (MANY,))
    for _ in range(3):
        assert not compression.is_on
        with compression.observed([array]):
            time.sleep(MANY / SLOW_BYTES_PER_SEC * 1.05)
    assert compression.is_on


def test_several_processes_compress_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    compression = Compression(None)
    for _ in range(5):
        compression.observe(MANY, 3600)
    assert not compression.is_on
