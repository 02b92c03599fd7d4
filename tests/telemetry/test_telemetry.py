"""The record of what happened: told, counted and written, and never at the cost of a save."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from etils import epath
from hypothesis import strategies as st
from support.processes import run_processes, run_python
from support.training import mlp

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
from torchax_ckpt.errors import SaveError
from torchax_ckpt.policies.described import described
from torchax_ckpt.storage.arrays import write_step
from torchax_ckpt.storage.medium import containment
from torchax_ckpt.telemetry import journal, recorder
from torchax_ckpt.telemetry.events import Event
from torchax_ckpt.telemetry.journal import FOLDER, Journal, read_events
from torchax_ckpt.telemetry.stats import Quantiles

STATE = {"w": np.arange(3)}


def recorded(directory: Path) -> list[list[Event]]:
    """The events of each run, in their order."""
    return list(read_events(epath.Path(directory)).values())


def names(events: list[Event]) -> list[tuple[str, int | None]]:
    return [(event.name, event.step) for event in events]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    write = write_step.write_step

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write_step, "write_step", fail)
    return lambda: monkeypatch.setattr(write_step, "write_step", write)


# --- what is told and written ---


def test_everything_that_happens_is_told_and_written_in_its_order(directory: Path) -> None:
    told: list[Event] = []
    model = mlp()
    keep = policies.LatestN(1)
    with TorchaxCheckpointer(directory, preservation_policy=keep, on_event=told.append) as ckpt:
        ckpt.attach(model)
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


def test_restores_failures_and_branches_are_written_too(
    directory: Path, failing: Callable[[], None]
) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        ckpt.save(1, force=True)
        with pytest.raises(SaveError):
            ckpt.wait_until_finished()
        failing()
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


SEVERAL = """
    import sys
    from processes_program import Training, report
    from torchax_ckpt import TorchaxCheckpointer

    told = []
    with TorchaxCheckpointer(sys.argv[4], on_event=lambda e: told.append(e.name)) as ckpt:
        training = Training(0)
        training.attach(ckpt)
        for step in (1, 2):
            training.step()
            ckpt.save(step, force=True)
    report(told=told, durable=ckpt.stats().num_durable)
"""


def test_each_of_several_processes_is_told_and_one_writes(directory: Path) -> None:
    first, second = (report for (report,) in run_processes(SEVERAL, 2, str(directory)))
    saves = ["saving", "durable", "saving", "durable"]
    assert first == {"told": ["started", *saves, "closed"], "durable": 2}
    assert second == {"told": saves, "durable": 2}
    (run,) = recorded(directory)
    assert [event.name for event in run] == first["told"]


# --- stats ---


def test_stats_count_and_give_quantiles(directory: Path, failing: Callable[[], None]) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        nothing = ckpt.stats()
        assert (nothing.num_saves, nothing.blocking_secs) == (0, None)
        ckpt.save(2, state=STATE)
        with pytest.raises(SaveError):
            ckpt.wait_until_finished()
        failing()
        for step in (4, 6, 9):
            ckpt.save(step, state=STATE, force=True)
            assert not ckpt.save(step, state=STATE)
            ckpt.wait_until_finished()
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


def test_a_slow_look_at_a_step_holds_up_no_save(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    opened = threading.Event()

    def slow(path: Any) -> int:
        threads.append(threading.current_thread().name)
        assert opened.wait(60)
        return 7

    monkeypatch.setattr(containment, "stored_bytes", slow)
    with TorchaxCheckpointer(directory) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state=STATE, force=True)
            ckpt.wait_until_finished(timeout_secs=30)
        assert ckpt.stats().num_bytes is None
        opened.set()
    assert threads == ["events", "events"]
    assert ckpt.stats().num_bytes == Quantiles(p50=7, p90=7)


def test_a_step_that_is_there_already_counts_as_neither_saved_nor_skipped(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        assert ckpt.save(1, state=STATE)
        assert not ckpt.save(1, state=STATE, force=True)
        monkeypatch.setattr(ckpt._preemption, "decide", lambda step: True)
        assert not ckpt.save(1, state=STATE)
        assert (ckpt.stats().num_saves, ckpt.stats().num_skipped) == (1, 0)


def test_restores_are_counted(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        ckpt.save(1, force=True)
        ckpt.restore(1)
        assert ckpt.stats().num_restores == 1
        assert ckpt.stats().restore_secs is not None


def test_a_declined_save_still_costs_next_to_nothing(directory: Path) -> None:
    never = policies.SpecificStepsPolicy([0])
    with TorchaxCheckpointer(directory, save_decision_policy=never, on_event=print) as ckpt:
        ckpt.save(1, state=STATE, force=True)
        ckpt.wait_until_finished()
        telemetry = ckpt._telemetry
        began = time.perf_counter()
        for step in range(2, 10_002):
            telemetry.skipped(step)
        assert (time.perf_counter() - began) / 10_000 < 5e-6  # 20 us is what a decline may cost
        assert ckpt.stats().num_skipped == 10_000


# --- the hook ---


def test_the_hook_is_called_on_one_thread_of_its_own(directory: Path) -> None:
    threads: set[threading.Thread] = set()
    hook = lambda event: threads.add(threading.current_thread())  # noqa: E731
    with TorchaxCheckpointer(directory, on_event=hook) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state=STATE, force=True)
    (thread,) = threads
    assert thread.name == "events"
    assert not thread.is_alive()


def test_what_the_hook_raises_is_logged_once_and_harms_nothing(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with TorchaxCheckpointer(directory, on_event=lambda event: 1 / 0) as ckpt:  # type: ignore[arg-type]
        for step in (1, 2):
            ckpt.save(step, state=STATE, force=True)
    assert ckpt.all_steps() == [1, 2]
    said = [r for r in caplog.records if "on_event failed" in r.getMessage()]
    assert len(said) == 1
    assert said[0].exc_info is not None
    assert names(recorded(directory)[0])[-1] == ("closed", 2)


def test_a_hook_that_means_to_exit_ends_nothing(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    def on_event(event: Event) -> None:
        told.append(event.name)
        raise SystemExit(1)

    with TorchaxCheckpointer(directory, on_event=on_event) as ckpt:
        ckpt.save(1, state=STATE, force=True)
    assert told == ["started", "saving", "durable", "closed"]
    assert caplog.text.count("on_event failed") == 1
    assert names(recorded(directory)[0])[-1] == ("closed", 1)


def test_an_event_that_cannot_be_written_is_left_out(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(event: Event) -> None:
        if event.name == "saving":
            event.values["what"] = np.int64(3)  # type: ignore[index]

    with TorchaxCheckpointer(directory, on_event=spoil) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state=STATE, force=True)
    assert caplog.text.count("cannot be written") == 1
    (run,) = recorded(directory)
    assert [e.name for e in run] == ["started", "durable", "durable", "closed"]


def test_rules_of_numpys_numbers_are_noted_as_others_are(directory: Path) -> None:
    rules: list[policies.PreservationPolicy] = [
        policies.LatestN(np.int64(3)),
        policies.CustomSteps([np.int64(5)]),
        policies.EveryNSeconds(np.float64(60)),
        policies.LatestN(object()),
    ]
    noted = [rule for policy in rules for rule in described(policy)]
    assert json.loads(json.dumps(noted)) == [
        {"rule": "LatestN", "n": 3},
        {"rule": "CustomSteps", "steps": [5]},
        {"rule": "EveryNSeconds", "interval_secs": 60.0},
        {"rule": "LatestN"},
    ]
    with TorchaxCheckpointer(directory, preservation_policy=rules[0]) as ckpt:
        ckpt.save(1, state=STATE)
    (run,) = recorded(directory)
    assert run[0].values["keeps"] == [{"rule": "LatestN", "n": 3}]


@pytest.mark.parametrize("broken", ["version", "hostname", "event", "count"])
def test_telemetry_that_breaks_costs_neither_training_nor_saves(
    broken: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise importlib.metadata.PackageNotFoundError("not here")

    if broken == "version":
        monkeypatch.setattr(importlib.metadata, "version", fail)
    elif broken == "hostname":
        monkeypatch.setattr("platform.node", fail)
    elif broken == "event":
        monkeypatch.setattr(recorder, "bounded", fail)
    else:
        monkeypatch.setattr(recorder.Tally, "take", fail)
    with TorchaxCheckpointer(directory) as ckpt:
        for step in (1, 2):
            assert ckpt.save(step, state=STATE, force=True)
            ckpt.wait_until_finished()
    with TorchaxCheckpointer(directory) as ckpt:
        assert ckpt.all_steps() == [1, 2]
    if broken == "version":
        (run,) = recorded(directory)
        assert run[0].values["version"] == "unknown"


def test_a_hook_that_hangs_holds_up_neither_saves_nor_close_for_long(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "_CLOSING_SECS", 0.2)
    opened = threading.Event()
    with TorchaxCheckpointer(directory, on_event=lambda event: opened.wait(60)) as ckpt:  # type: ignore[arg-type]
        for step in (1, 2, 3):
            ckpt.save(step, state=STATE, force=True)
            ckpt.wait_until_finished()
    assert ckpt.all_steps() == [1, 2, 3]
    assert "still being told or written" in caplog.text
    opened.set()


def test_a_hook_may_ask_and_close(directory: Path) -> None:
    asked: list[Any] = []

    def on_event(event: Event) -> None:
        if event.name == "durable":
            asked.append((ckpt.stats().num_durable, ckpt.all_steps()))
            ckpt.close()

    ckpt = TorchaxCheckpointer(directory, on_event=on_event)
    ckpt.save(1, state=STATE)
    ckpt._saver.wait()
    ckpt._telemetry._thread.join(30)  # type: ignore[union-attr]
    assert asked == [(1, [1])]


# --- the journal ---


def test_a_medium_that_refuses_events_harms_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Journal, lines: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "append", refuse)
    with TorchaxCheckpointer(directory) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state=STATE, force=True)
            ckpt.wait_until_finished()
    assert ckpt.all_steps() == [1, 2]
    assert caplog.text.count("events cannot be written") == 1
    assert recorded(directory) == []


def test_a_medium_that_stands_still_holds_up_close_for_seconds_only(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_CLOSING_SECS", 0.2)
    opened = threading.Event()
    monkeypatch.setattr(Journal, "append", lambda self, lines: opened.wait(60))
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=STATE)
    assert ckpt.all_steps() == [1]
    opened.set()


def test_lines_are_written_once_the_medium_takes_them_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_RETRY_SECS", 0.01)
    append, calls = Journal.append, []

    def twice(self: Journal, lines: Any) -> None:
        calls.append(len(lines))
        if len(calls) == 1:
            append(self, [lines[0], lines[1][:20]])  # as far as the disk let it
            self._is_torn = True
            raise OSError(28, "No space left on device")
        append(self, lines)

    monkeypatch.setattr(Journal, "append", twice)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=STATE)
    (run,) = recorded(directory)
    assert names(run) == [("started", None), ("saving", 1), ("durable", 1), ("closed", 1)]


def test_a_removed_directory_is_not_brought_back_by_events(tmp_path: Path) -> None:
    gone = Journal(epath.Path(tmp_path / "gone"), "0" * 8)
    with pytest.raises(FileNotFoundError):
        gone.append([b"{}\n"])
    assert not (tmp_path / "gone").exists()


def test_nothing_is_written_through_links(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FOLDER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="Not a directory"):
        Journal(epath.Path(tmp_path / "run"), "0" * 8).append([b"{}\n"])
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert read_events(epath.Path(tmp_path / "run")) == {}


def test_files_are_closed_to_everybodys_writing(directory: Path) -> None:
    before = os.umask(0)
    try:
        with TorchaxCheckpointer(directory) as ckpt:
            ckpt.save(1, state=STATE)
    finally:
        os.umask(before)
    for path in [directory / FOLDER, *(directory / FOLDER).iterdir()]:
        assert not path.stat().st_mode & stat.S_IWOTH


def test_the_record_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_FILES", 3)
    monkeypatch.setattr(journal, "MAX_FILE_BYTES", 200)
    record = Journal(epath.Path(tmp_path), "0" * 8)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "notes").write_text("somebody's")
    for step in range(50):
        record.append([Event("saving", 1000.0 + step, step).to_line()])
    files = sorted((tmp_path / FOLDER).iterdir())
    assert len(files) == 4
    assert files[-1].name == "notes"
    assert sum(f.stat().st_size for f in files) < 4 * 300
    (run,) = recorded(tmp_path)
    assert [event.step for event in run] == list(range(run[0].step or 0, 50))  # the oldest went
    assert 3 < len(run) < 25


KILLED = """
    import os, signal, sys, threading
    import torchax
    torchax.enable_globally()
    import numpy as np
    from torchax_ckpt import TorchaxCheckpointer
    from torchax_ckpt.storage.arrays import write_step
    from torchax_ckpt.telemetry.journal import Journal

    write, append, written = write_step.write_step, Journal.append, threading.Event()
    def append_and_say(self, lines):
        append(self, lines)
        if any(b'"saving","step":2' in line for line in lines):
            written.set()
    Journal.append = append_and_say
    def die(path, *args, **kwargs):
        if "writing-2" in path.name:
            assert written.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, *args, **kwargs)
    write_step.write_step = die
    ckpt = TorchaxCheckpointer(sys.argv[1])
    for step in (1, 2):
        ckpt.save(step, state={"w": np.arange(3)}, force=True)
    ckpt.wait_until_finished()
"""


def test_a_killed_run_leaves_its_record_and_the_next_adds_to_it(directory: Path) -> None:
    killed = run_python(KILLED, str(directory), devices=1, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (journal,) = (directory / FOLDER).iterdir()
    with open(journal, "ab") as file:
        file.write(b'{"at":1795273990.1,"event":"dur')  # in the middle of a line
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(2, state=STATE, force=True)
    first, second = recorded(directory)
    assert names(first) == [("started", None), ("saving", 1), ("durable", 1), ("saving", 2)]
    assert names(second)[-1] == ("closed", 2)


ENDING = """
    import sys
    import torchax
    torchax.enable_globally()
    import numpy as np
    from torchax_ckpt import TorchaxCheckpointer
    ckpt = TorchaxCheckpointer(sys.argv[1], on_event=lambda event: print(event.name))
    ckpt.save(1, state={"w": np.arange(3)})
    if "drop" in sys.argv:
        ckpt.wait_until_finished()
        thread = ckpt._telemetry._thread
        del ckpt
        import gc
        gc.collect()
        thread.join(30)
        assert not thread.is_alive()
"""


@pytest.mark.parametrize(
    ("how", "end"), [("exit", ["durable", "closed"]), ("drop", ["durable", "closed"])]
)
def test_without_close_everything_is_still_told_and_written(
    how: str, end: list[str], directory: Path
) -> None:
    result = run_python(ENDING, str(directory), how, devices=1, fresh=True)
    assert result.stdout.split()[-2:] == end
    (run,) = recorded(directory)
    assert [event.name for event in run][-2:] == end


# --- what is read ---


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"at":1}',
        b'{"at":1,"event":["saving"]}',
        b'{"at":1,"event":"exploded"}',
        b'{"at":"1","event":"saving"}',
        b'{"at":NaN,"event":"saving"}',
        b'{"at":-1,"event":"saving"}',
        b'{"at":1e999,"event":"saving"}',
        b'{"at":true,"event":"saving"}',
        b'{"at":1,"event":"saving","step":-1}',
        b'{"at":1,"event":"saving","step":1.5}',
        b'{"at":1,"event":"saving","step":' + b"9" * 5000 + b"}",
        b"\xff\xfe",
    ],
)
def test_lines_that_are_no_events_are_left_out(line: bytes) -> None:
    assert Event.of_line(line) is None


def test_values_of_another_form_are_left_out() -> None:
    said = {
        "at": 5,
        "event": "failed",
        "step": 2,
        "secs": float("inf"),
        "error": "x" * 5000,
        "other": {"a": []},
    }
    assert Event.of_line(json.dumps(said).encode()) == Event("failed", 5.0, 2, {})


@hypothesis.given(st.binary(max_size=300) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_an_event_or_none(line: bytes) -> None:
    event = Event.of_line(line)
    assert event is None or Event.of_line(event.to_line()) is not None


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    os.mkfifo(folder / f"{1:019d}-{'0' * 8}.jsonl")
    (tmp_path / "secret").write_bytes(Event("saving", 1.0, 7).to_line())
    (folder / f"{2:019d}-{'1' * 8}.jsonl").symlink_to(tmp_path / "secret")
    (folder / f"{3:019d}-{'2' * 8}.jsonl").mkdir()
    with open(folder / f"{4:019d}-{'3' * 8}.jsonl", "wb") as file:
        file.write(Event("saving", 2.0, 8).to_line())
        file.truncate(1 << 40)  # a terabyte of nothing
    assert read_events(epath.Path(tmp_path)) == {"3" * 8: [Event("saving", 2.0, 8)]}


BOUNDED = """
    import json, re, sys
    from pathlib import Path
    from etils import epath
    from torchax_ckpt.telemetry.journal import read_events

    def most_kib():
        return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

    before = most_kib()
    runs = read_events(epath.Path(sys.argv[1]))
    print(json.dumps([(most_kib() - before) >> 10, sum(map(len, runs.values())), sorted(runs)]))
"""


@pytest.mark.parametrize("kind", ["lines", "events"])
def test_more_than_runs_write_is_read_in_bounded_memory(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    line = b"%d\n" if kind == "lines" else b'{"at":%d,"event":"closed"}\n'
    content = Event("saving", 1.0, 1).to_line()
    content += b"".join(line % n for n in range((1 << 20) // len(line)))
    for index in range(64):
        (folder / f"{index:019d}-{index:08x}.jsonl").write_bytes(content)
    program = run_python(BOUNDED, str(tmp_path), fresh=True)
    mib, num_events, runs = json.loads(program.stdout.splitlines()[-1])
    assert mib < 500
    assert runs[-1] == f"{63:08x}"  # the newest are read
    assert num_events >= len(runs) >= 1


def test_of_too_much_the_newest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    lines = [Event("saving", 1.0 + i, i).to_line() for i in range(10)]
    for index in range(5):
        content = b"".join(lines[2 * index : 2 * index + 2])
        (folder / f"{index:019d}-{'0' * 8}.jsonl").write_bytes(content)
    (every,) = recorded(tmp_path)
    assert [event.step for event in every] == list(range(10))
    monkeypatch.setattr(journal, "_MAX_ALL_LINES", 3)
    (some,) = recorded(tmp_path)
    assert [event.step for event in some] == [7, 8, 9]
    monkeypatch.setattr(journal, "_MAX_ALL_LINES", 100)
    monkeypatch.setattr(journal, "_MAX_ALL_BYTES", 3 * len(lines[0]))
    (some,) = recorded(tmp_path)
    assert [event.step for event in some] == [6, 7, 8, 9]


def test_the_record_of_a_bucket_is_rewritten_as_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as no bucket is needed for it; see tests/faults/test_gcs.py for one."""
    written: dict[str, bytes] = {}

    class Bucket:
        def __init__(self, path: str) -> None:
            self.path = path

        def __truediv__(self, name: str) -> Bucket:
            return Bucket(f"{self.path}/{name}")

        def __str__(self) -> str:
            return self.path

        def iterdir(self) -> list[Any]:
            return []

        def write_bytes(self, content: bytes) -> None:
            written[self.path] = content

    journal = Journal(Bucket("gs://bucket/run"), "0" * 8)
    assert journal.patience_secs >= 1
    journal.append([b"1\n"])
    journal.append([b"2\n", b"3\n"])
    ((name, content),) = written.items()
    assert name.startswith("gs://bucket/run/events/")
    assert content == b"1\n2\n3\n"


def test_nothing_of_the_hook_or_record_is_logged_when_all_is_well(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with TorchaxCheckpointer(directory, on_event=lambda event: None) as ckpt:
        ckpt.save(1, state=STATE)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
