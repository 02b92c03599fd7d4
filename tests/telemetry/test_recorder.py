"""What is told and written of a run, and the hook: never at the cost of a save."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import logging
import platform
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath
from support import PROGRAMS
from support.damage import fill_disk
from support.events import names, recorded
from support.live import Together
from support.steps import save
from support.training import mlp
from support.waiting import wait_until

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
from torchax_ckpt.errors import SaveError
from torchax_ckpt.layout import manifest
from torchax_ckpt.policies.preservation_rules import rules_of
from torchax_ckpt.storage.directory import shared_files
from torchax_ckpt.telemetry import recorder
from torchax_ckpt.telemetry.events import Event
from torchax_ckpt.telemetry.journal import read_events
from torchax_ckpt.telemetry.stats import Quantiles
from torchax_ckpt.telemetry.timeline import bytes_over_time, runs_of

STATE = {"w": np.arange(3)}


def test_everything_that_happens_is_told_and_written_in_its_order(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On one thread, and without a word in the log."""
    told: list[Event] = []
    threads: set[threading.Thread] = set()

    def on_event(event: Event) -> None:
        told.append(event)
        threads.add(threading.current_thread())

    keep = policies.LatestN(1)
    with TorchaxCheckpointer(directory, preservation_policy=keep, on_event=on_event) as ckpt:
        ckpt.attach(mlp())
        for step in (1, 2):
            ckpt.save(step, force=True)
            ckpt.wait_until_finished()
    expected = [
        *[("started", None), ("saving", 1), ("durable", 1)],
        *[("saving", 2), ("durable", 2), ("deleted", None), ("closed", 2)],
    ]
    assert names(told) == expected
    (written,) = recorded(directory)
    assert names(written) == expected
    for event, line in zip(told, written, strict=True):
        assert line.values == event.values
        assert line.time_secs == pytest.approx(event.time_secs, abs=1e-6)
    assert told[0].values["keeps"] == [{"rule": "LatestN", "n": 1}]
    assert told[5].values["steps"] == [1]
    durable = told[4].values
    assert 0 < durable["blocking_secs"] < durable["durable_secs"]
    files = [p for p in (directory / "2").rglob("*") if p.is_file()]
    assert durable["num_bytes"] == sum(p.stat().st_size for p in files)
    (thread,) = threads
    assert thread.name == "events"
    assert not thread.is_alive()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_durable_event_has_the_metrics_that_a_chart_can_show(directory: Path) -> None:
    told: list[Event] = []
    odd = {"nan": float("nan"), "inf": -float("inf"), "name": "x", "list": [1], "yes": True}
    many = {f"m{number}": number for number in range(30)}
    with TorchaxCheckpointer(directory, on_event=told.append) as ckpt:
        ckpt.save(1, state=STATE, metrics={**odd, "loss": np.float32(0.5), "least": -2}, force=True)
        ckpt.save(2, state=STATE, metrics={"x" * 101: 1.0, **many}, force=True)
        ckpt.save(3, state=STATE, force=True)
    (written,) = recorded(directory)
    for events in (told, written):
        durable = [event.values for event in events if event.name == "durable"]
        assert durable[0]["metrics"] == {"loss": 0.5, "least": -2}
        assert durable[1]["metrics"] == dict(list(many.items())[:20])
        assert "metrics" not in durable[2]


def test_restores_failures_and_branches_are_written_too(directory: Path) -> None:
    free_disk = fill_disk()
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        ckpt.save(1, force=True)
        with pytest.raises(SaveError):
            ckpt.wait_until_finished()
        free_disk()
        for step in (1, 2, 3):
            ckpt.save(step, force=True)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        ckpt.restore(2)
        ckpt.save(3, force=True)
    first, second = recorded(directory)
    assert names(first)[:4] == [("started", None), ("saving", 1), ("failed", 1), ("saving", 1)]
    assert "No space left" in first[2].values["error"]
    assert names(second) == [
        # Before the lease was taken, and written once it was.
        *[("restored", 3), ("restored", 2), ("started", None), ("saving", 3)],
        *[("durable", 3), ("set_aside", None), ("closed", 3)],
    ]
    assert second[0].values["is_verified"] is True
    assert second[5].values["steps"] == [3]


def test_who_only_reads_writes_nothing_and_is_told(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        ckpt.save(1, force=True)
    before = {p: p.stat().st_mtime_ns for p in [directory, *directory.rglob("*")]}
    told: list[Event] = []
    options = CheckpointOptions(read_only=True)
    with TorchaxCheckpointer(directory, options=options, on_event=told.append) as ckpt:
        ckpt.attach(mlp())
    assert names(told) == [("restored", 1)]
    assert {p: p.stat().st_mtime_ns for p in [directory, *directory.rglob("*")]} == before
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        ckpt.attach(mlp())
        assert "events" not in {thread.name for thread in threading.enumerate()}


def test_where_the_training_is_is_told_now_and_then(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_REACHED_SECS", 0.05)
    never = policies.SpecificStepsPolicy([1])
    reached = threading.Event()

    def on_event(event: Event) -> None:
        if event.name == "reached":
            assert event.step == 5
            assert event.values["num_skipped"] == 4
            reached.set()

    with TorchaxCheckpointer(directory, save_decision_policy=never, on_event=on_event) as ckpt:
        ckpt.save(1, state=STATE)
        ckpt.wait_until_finished()
        for step in (2, 3, 4, 5):
            ckpt.save(step, state=STATE)
        assert reached.wait(30)
    (run,) = recorded(directory)
    assert ("reached", 5) in names(run)


@pytest.mark.slow
def test_each_of_several_processes_is_told_and_one_writes(
    together: Together, directory: Path
) -> None:
    (first,), (second,) = together(PROGRAMS / "arrays_on_processes.py", 2, "events", directory)
    saves = ["saving", "durable", "saving", "durable"]
    assert first == {"told": ["started", *saves, "closed"], "durable": 2}
    assert second == {"told": saves, "durable": 2}
    (run,) = recorded(directory)
    assert [event.name for event in run] == first["told"]


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_what_the_hook_raises_is_logged_once_and_harms_nothing(
    error: type[BaseException], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[tuple[str, int | None]] = []

    def on_event(event: Event) -> None:
        told.append((event.name, event.step))
        raise error

    with TorchaxCheckpointer(directory, on_event=on_event) as ckpt:
        save(ckpt, 1, 2, of=STATE)
    assert ckpt.all_steps() == [1, 2]
    (said,) = [r for r in caplog.records if "on_event failed" in r.getMessage()]
    assert said.exc_info is not None
    saves = [(name, step) for step in (1, 2) for name in ("saving", "durable")]
    assert told == names(recorded(directory)[0]) == [("started", None), *saves, ("closed", 2)]


def test_an_event_that_cannot_be_written_is_left_out(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(event: Event) -> None:
        if event.name == "saving":
            event.values["what"] = np.int64(3)  # type: ignore[index]

    with TorchaxCheckpointer(directory, on_event=spoil) as ckpt:
        save(ckpt, 1, 2, of=STATE)
    assert caplog.text.count("cannot be written") == 1
    (run,) = recorded(directory)
    assert [e.name for e in run] == ["started", "durable", "durable", "closed"]


def test_rules_of_numpys_numbers_are_noted_as_others_are(directory: Path) -> None:
    latest = policies.LatestN(np.int64(3))
    for policy, noted in (
        (latest, {"rule": "LatestN", "n": 3}),
        (policies.CustomSteps([np.int64(5)]), {"rule": "CustomSteps", "steps": [5]}),
        (policies.EveryNSeconds(np.float64(60)), {"rule": "EveryNSeconds", "interval_secs": 60.0}),
        (policies.LatestN(object()), {"rule": "LatestN"}),
    ):
        assert json.loads(json.dumps(rules_of(policy))) == [noted]
    with TorchaxCheckpointer(directory, preservation_policy=latest) as ckpt:
        ckpt.save(1, state=STATE)
    (run,) = recorded(directory)
    assert run[0].values["keeps"] == [{"rule": "LatestN", "n": 3}]


@pytest.mark.parametrize(
    ("broken", "name"),
    [(importlib.metadata, "version"), (platform, "node"), (recorder, "bounded"),
     (recorder.Tally, "take")],
)  # fmt: skip
def test_telemetry_that_breaks_costs_neither_training_nor_saves(
    broken: Any, name: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise importlib.metadata.PackageNotFoundError("not here")

    uncached = manifest._installed_version.__wrapped__
    monkeypatch.setattr(manifest, "_installed_version", uncached)
    monkeypatch.setattr(broken, name, fail)
    with TorchaxCheckpointer(directory) as ckpt:
        save(ckpt, 1, 2, of=STATE)
    assert TorchaxCheckpointer(directory).all_steps() == [1, 2]
    if name == "version":
        (run,) = recorded(directory)
        assert run[0].values["version"] == "unknown"


def test_a_hook_may_ask_and_close(directory: Path) -> None:
    asked: list[Any] = []

    def on_event(event: Event) -> None:
        if event.name == "durable":
            asked.append((ckpt.stats().num_durable, ckpt.all_steps()))
            ckpt.close()

    ckpt = TorchaxCheckpointer(directory, on_event=on_event)
    ckpt.save(1, state=STATE)
    ckpt._saver.wait()
    assert ckpt._telemetry._task is not None
    assert ckpt._telemetry._task.ended.wait(30)
    assert asked == [(1, [1])]


def test_stats_count_and_give_quantiles(directory: Path, preempt: Callable[[], None]) -> None:
    free_disk = fill_disk()
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        nothing = ckpt.stats()
        assert (nothing.num_saves, nothing.blocking_secs) == (0, None)
        ckpt.save(2)
        with pytest.raises(SaveError):
            ckpt.wait_until_finished()
        free_disk()
        for step in (4, 6):
            ckpt.save(step, force=True)
            assert not ckpt.save(step)
            # A forced save of what is there counts as neither saved nor skipped.
            assert not ckpt.save(step, force=True)
            ckpt.wait_until_finished()
        preempt()
        assert ckpt.save(9)
        assert not ckpt.save(9)  # which must be saved and is there
        ckpt.restore(9)
    stats = ckpt.stats()
    assert stats.num_saves == 4
    assert (stats.num_durable, stats.num_failed) == (3, 1)
    assert stats.num_skipped == 2
    assert stats.interval_steps == Quantiles(p50=2, p90=2.8)
    assert stats.blocking_secs is not None
    assert stats.durable_secs is not None
    assert 0 < stats.blocking_secs.p50 <= stats.blocking_secs.p90 < stats.durable_secs.p90
    assert stats.num_bytes is not None
    assert stats.num_bytes.p50 > 24
    assert (stats.num_restores, stats.restore_secs is not None) == (1, True)


# --- bytes that saves write and reuse ---

BASE_BYTES = 1 << 20


class Run:
    """A run with a frozen array; after each action, the newest event says what the steps take."""

    def __init__(self, directory: Path, policy: Any) -> None:
        self.directory = directory
        self.told: list[Event] = []
        self.ckpt = TorchaxCheckpointer(
            directory,
            options=CheckpointOptions(reuse=["state/base"]),
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
        run.save(*range(1, 7))
    durable = [event.values for event in run.told if event.name == "durable"]
    reused = [values["num_bytes"] - values["new_bytes"] for values in durable]
    assert reused[:2] == [0, 0]
    assert min(reused[2:]) > BASE_BYTES
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


def test_a_process_that_writes_no_journal_keeps_no_events(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but process 0; without a hook, no thread would ever take them."""
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    telemetry = recorder.Telemetry(epath.Path(directory))
    for step in (1, 2, 3):
        telemetry.emit("failed", step)
    assert telemetry._queue.empty()
    assert telemetry.stats().num_failed == 3
