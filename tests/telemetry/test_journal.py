"""The record of events on a medium: how it is written, and what is read of it."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath
from support import PROGRAMS
from support.events import names, recorded
from support.processes import run_python
from support.steps import save
from support.waiting import wait_until

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.storage.medium.stored_file import Log
from torchax_ckpt.telemetry import journal, recorder
from torchax_ckpt.telemetry.events import Event
from torchax_ckpt.telemetry.journal import FOLDER, Journal, read_events

STATE = {"w": np.arange(3)}


def test_a_medium_that_refuses_events_harms_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Journal, lines: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "append", refuse)
    with TorchaxCheckpointer(directory) as ckpt:
        save(ckpt, 1, 2, of=STATE)
    assert ckpt.all_steps() == [1, 2]
    assert caplog.text.count("events cannot be written") == 1
    assert recorded(directory) == []


@pytest.mark.parametrize("what", ["medium", "hook"])
def test_what_stands_still_holds_up_neither_saves_nor_close_for_long(
    what: str, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "_CLOSING_SECS", 0.2)
    opened = threading.Event()
    if what == "medium":
        monkeypatch.setattr(Journal, "append", lambda self, lines: opened.wait(60))
    hook: Any = (lambda event: opened.wait(60)) if what == "hook" else None
    with TorchaxCheckpointer(directory, on_event=hook) as ckpt:
        save(ckpt, 1, 2, 3, of=STATE)
    assert ckpt.all_steps() == [1, 2, 3]
    assert "still being delivered or written" in caplog.text
    opened.set()
    wait_until(lambda: "events" not in {thread.name for thread in threading.enumerate()})


def test_lines_are_written_once_the_medium_takes_them_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_RETRY_SECS", 0.01)
    append, calls = Journal.append, []

    def twice(self: Journal, lines: Any) -> None:
        calls.append(len(lines))
        if len(calls) == 1:
            append(self, [lines[0], lines[1][:20]])  # as far as the disk let it
            log = self._log
            assert isinstance(log, Log)
            log._is_torn = True
            raise OSError(28, "No space left on device")
        append(self, lines)

    monkeypatch.setattr(Journal, "append", twice)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state=STATE)
    (run,) = recorded(directory)
    assert names(run) == [("started", None), ("saving", 1), ("durable", 1), ("closed", 1)]


def test_events_bring_no_removed_directory_back_and_follow_no_links(tmp_path: Path) -> None:
    gone = Journal(epath.Path(tmp_path / "gone"), "0" * 8)
    with pytest.raises(FileNotFoundError):
        gone.append([b"{}\n"])
    assert not (tmp_path / "gone").exists()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FOLDER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="Not a directory"):
        Journal(epath.Path(tmp_path / "run"), "0" * 8).append([b"{}\n"])
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert read_events(epath.Path(tmp_path / "run")) == {}


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


@pytest.mark.slow
def test_a_killed_run_leaves_its_record_and_the_next_adds_to_it(directory: Path) -> None:
    arguments = PROGRAMS / "saves.py", "killed_once_recorded", str(directory)
    killed = run_python(*arguments, devices=1, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (journal,) = (directory / FOLDER).iterdir()
    with open(journal, "ab") as file:
        file.write(b'{"at":1795273990.1,"event":"dur')  # in the middle of a line
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(2, state=STATE, force=True)
    first, second = recorded(directory)
    assert names(first) == [("started", None), ("saving", 1), ("durable", 1), ("saving", 2)]
    assert names(second)[-1] == ("closed", 2)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exit", "drop"])
def test_without_close_everything_is_still_told_and_written(how: str, directory: Path) -> None:
    arguments = PROGRAMS / "saves.py", "unclosed_with_events", str(directory), how
    result = run_python(*arguments, devices=1, fresh=True)
    (run,) = recorded(directory)
    assert [event.name for event in run][-2:] == ["durable", "closed"]
    assert result.stdout.split()[-2:] == ["durable", "closed"]


def test_lines_that_are_no_events_and_values_of_another_form_are_left_out() -> None:
    times = (b'"1"', b"NaN", b"-1", b"1e999", b"true")
    steps = (b"-1", b"1.5", b"9" * 5000)
    lines = [
        *(b"", b"null", b"[]", b"{", b"[" * 100_000, b"\xff\xfe"),
        *(b'{"at":1}', b'{"at":1,"event":["saving"]}', b'{"at":1,"event":"exploded"}'),
        *(b'{"at":%s,"event":"saving"}' % at for at in times),
        *(b'{"at":1,"event":"saving","step":%s}' % step for step in steps),
    ]
    assert [Event.of_line(line) for line in lines] == [None] * len(lines)
    odd = {"secs": float("inf"), "error": "x" * 5000, "other": {"a": []}}
    line = json.dumps({"at": 5, "event": "failed", "step": 2, **odd}).encode()
    assert Event.of_line(line) == Event("failed", 5.0, 2, {})
    for metrics in (
        [1],
        {"a": "x"},
        {"a": True},
        {"a": 1e200},
        {"x" * 101: 1},
        {str(n): n for n in range(21)},
    ):
        line = json.dumps({"at": 5, "event": "durable", "metrics": metrics}).encode()
        assert Event.of_line(line) == Event("durable", 5.0, None, {})
    line = b'{"at":5,"event":"durable","metrics":{"a":-1.5}}'
    assert Event.of_line(line) == Event("durable", 5.0, None, {"metrics": {"a": -1.5}})
    before = Event.of_line(b'{"at":5,"event":"restored","secs":2.5}')
    assert before == Event("restored", 5.0, None, {"restore_secs": 2.5})


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


@pytest.mark.slow
def test_more_than_runs_write_is_read_in_bounded_memory(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    line = b'{"at":%d,"event":"closed"}\n'
    content = Event("saving", 1.0, 1).to_line()
    content += b"".join(line % n for n in range((1 << 20) // len(line)))
    for index in range(64):
        (folder / f"{index:019d}-{index:08x}.jsonl").write_bytes(content)
    program = run_python(PROGRAMS / "memory.py", "of_events", str(tmp_path), fresh=True)
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
