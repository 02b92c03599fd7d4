"""The bytes that saves write and reuse, and that all steps take, as events and statistics say."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath
from support.events import recorded
from support.training import mlp
from support.waiting import wait_until

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
from torchax_ckpt.stored import shared_files
from torchax_ckpt.telemetry.events import Event
from torchax_ckpt.telemetry.journal import read_events
from torchax_ckpt.telemetry.stats import Quantiles
from torchax_ckpt.telemetry.timeline import bytes_over_time, runs_of

BASE_BYTES = 1 << 20


class Run:
    """A run with unchanged arrays; after each action, the newest event says what the steps take."""

    def __init__(self, directory: Path, policy: Any) -> None:
        self.directory = directory
        self.told: list[Event] = []
        self.ckpt = TorchaxCheckpointer(
            directory,
            options=CheckpointOptions(reuse=True),
            preservation_policy=policy,
            on_event=self.told.append,
        )

    def save(self, *steps: int) -> None:
        base = np.random.default_rng(0).random((BASE_BYTES // 4,), np.float32)
        for step in steps:
            state = {"base": jax.device_put(base), "x": jax.device_put(np.float32(step))}
            self.ckpt.save(step, state=state, force=True)
            self.ckpt.wait_until_finished()
            self.check()

    def check(self) -> None:
        wait_until(lambda: self.totals[-1] == self.on_disk)

    @property
    def on_disk(self) -> int:
        numbered = [path for path in self.directory.iterdir() if path.name.isdecimal()]
        files = [p.stat() for step in numbered for p in step.rglob("*") if p.is_file()]
        return sum({status.st_ino: status.st_size for status in files}.values())

    @property
    def totals(self) -> list[int]:
        return [e.values["total_bytes"] for e in self.told if "total_bytes" in e.values]


def test_events_and_stats_say_what_was_written_and_what_was_reused(directory: Path) -> None:
    run = Run(directory, policies.PreserveAll())
    with run.ckpt:
        run.save(*range(1, 9))
    durable = [event.values for event in run.told if event.name == "durable"]
    reused = [values["num_bytes"] - values["new_bytes"] for values in durable]
    assert reused[:4] == [0, 0, 0, 0]
    assert min(reused[4:]) > BASE_BYTES
    new = [values["new_bytes"] for values in durable]
    assert run.totals == [0, *itertools.accumulate(new)]
    assert run.ckpt.stats().new_bytes == Quantiles.of(new)
    curve = bytes_over_time(runs_of(read_events(epath.Path(directory)), is_running=False))
    assert [total for _, total in curve] == run.totals
    (written,) = recorded(directory)
    assert [event.values for event in written] == [event.values for event in run.told]


@pytest.mark.parametrize("keep", [1, 2])
def test_the_total_counts_a_reused_byte_once_whatever_is_deleted(
    keep: int, directory: Path
) -> None:
    run = Run(directory, policies.LatestN(keep))
    with run.ckpt:
        run.save(*range(1, 8))
    # Never more than two copies once the first ones are deleted, plus one that is being replaced.
    assert max(run.totals[-6:]) < 2.5 * BASE_BYTES


def test_the_total_follows_a_run_that_goes_back_and_one_that_starts_again(directory: Path) -> None:
    run = Run(directory, policies.PreserveAll())
    with run.ckpt:
        run.ckpt.attach(mlp())
        run.save(1, 2, 3, 4)
        run.ckpt.delete(2)
        run.check()
    shutil.rmtree(directory / "4")  # as by a program that was killed before it told
    run = Run(directory, policies.PreserveAll())
    before = run.on_disk
    with run.ckpt:
        run.ckpt.attach(mlp())
        run.save(5)
        assert run.totals[0] == before
        run.ckpt.restore(1)
        run.save(3)  # is first committed beside the old step of this number
    assert {path.name for path in directory.glob("[0-9a]*")} > {"1", "3", "abandoned-3"}


def test_where_storage_does_not_answer_the_bytes_are_left_out_until_it_does(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(directory, policies.PreserveAll())
    with run.ckpt:
        run.save(1)
        with monkeypatch.context() as failing:

            def fail(committed: Any) -> Any:
                raise OSError("stale handle")

            failing.setattr(shared_files, "_listed", fail)
            run.ckpt.save(2, state={"x": np.arange(3)}, force=True)
            run.ckpt.wait_until_finished()
            wait_until(lambda: run.told[-1].name == "durable")
        assert {"num_bytes", "new_bytes", "total_bytes"}.isdisjoint(run.told[-1].values)
        run.save(3)
