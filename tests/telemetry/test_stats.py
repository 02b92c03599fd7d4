"""The counts and quantiles of a run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath
from support.damage import fill_disk
from support.training import mlp

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.errors import SaveError
from torchax_ckpt.stored import shared_files
from torchax_ckpt.telemetry.stats import Quantiles

STATE = {"w": np.arange(3)}


def test_stats_count_and_give_quantiles(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_disk = fill_disk(monkeypatch)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        nothing = ckpt.stats()
        assert (nothing.num_saves, nothing.blocking_secs) == (0, None)
        ckpt.save(2)
        with pytest.raises(SaveError):
            ckpt.wait_until_finished()
        free_disk()
        for step in (4, 6, 9):
            ckpt.save(step, force=True)
            assert not ckpt.save(step)
            # A forced save of what is there counts as neither saved nor skipped.
            assert not ckpt.save(step, force=True)
            ckpt.wait_until_finished()
        monkeypatch.setattr(ckpt._preemption, "decide", lambda step: True)
        assert not ckpt.save(9)
        monkeypatch.undo()
        ckpt.restore(9)
    stats = ckpt.stats()
    assert stats.num_saves == 4
    assert (stats.num_durable, stats.num_failed) == (3, 1)
    assert stats.num_skipped == 3
    assert stats.interval_steps == Quantiles(p50=2, p90=2.8)
    assert stats.blocking_secs is not None
    assert stats.durable_secs is not None
    assert 0 < stats.blocking_secs.p50 <= stats.blocking_secs.p90 < stats.durable_secs.p90
    assert stats.num_bytes is not None
    assert stats.num_bytes.p50 > 24
    assert (stats.num_restores, stats.restore_secs is not None) == (1, True)


def test_a_slow_look_at_a_step_holds_up_no_save(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    opened = threading.Event()

    def slow(committed: Any) -> tuple[int, dict[Any, Any]]:
        if committed.path.parent == epath.Path(directory):  # not of an earlier test's thread
            threads.append(threading.current_thread().name)
            assert opened.wait(60)
        return 7, {}

    monkeypatch.setattr(shared_files, "_listed", slow)
    with TorchaxCheckpointer(directory) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state=STATE, force=True)
            ckpt.wait_until_finished(timeout_secs=30)
        assert ckpt.stats().num_bytes is None
        opened.set()
    assert threads == ["events", "events"]
    assert ckpt.stats().num_bytes == Quantiles(p50=7, p90=7)
