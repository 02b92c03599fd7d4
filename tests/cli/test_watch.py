"""The view of a run: what its events and its steps say, while it runs and after it."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath
from rich.console import Console
from support import synthetic
from support.commands import run, run_json
from support.events import recorded
from support.waiting import wait_until
from typer.testing import CliRunner

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.cli import exit_codes, output
from torchax_ckpt.cli.app import app
from torchax_ckpt.cli.watching import watching
from torchax_ckpt.cli.watching.view import Seen, view
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.telemetry.events import Event
from torchax_ckpt.telemetry.journal import read_events
from torchax_ckpt.telemetry.timeline import runs_of


def lines(seen: Seen) -> dict[str, str]:
    """The rendered lines by their labels; the rows of the table by their steps."""
    console = Console(file=io.StringIO(), width=1000)
    console.print(view(seen))
    assert isinstance(console.file, io.StringIO)
    return by_label(console.file.getvalue())


def by_label(text: str) -> dict[str, str]:
    rows = [line.strip().split("  ", 1) for line in text.splitlines()]
    return {row[0]: " ".join(row[1].split()) for row in rows if len(row) > 1}


def test_a_run_is_followed_from_its_first_save_to_its_end(directory: Path) -> None:
    state = {"w": np.arange(1000)}
    with TorchaxCheckpointer(directory) as ckpt:
        for step in (10, 20):
            ckpt.save(step, state=state, force=True)
            ckpt.wait_until_finished()
        wait_until(lambda: [e.step for e in recorded(directory)[0]].count(20) == 2)
        found = by_label(run("watch", directory))
        assert found["directory"] == str(directory)
        assert found["program"].startswith("running on ")
        assert f"process {os.getpid()} for " in found["program"]
        assert ", at step 20 or later; last event" in found["program"]
        assert found["newest step"].startswith("20, durable for ")
        assert found["newest step"].endswith("; 2 steps")
        assert {"save blocks", "durable after", "interval"} <= found.keys()
        assert not {"in flight", "failures"} & found.keys()
        assert found["20"].startswith("durable ")
        assert ", 10 steps " in found["20"]
        assert "free: room for" in found["disk"]
        events = read_events(epath.Path(directory))
    # As it was in the middle of the second save, and as it would be if it had been killed there.
    ((name, every),) = events.items()
    begun = next(i for i, e in enumerate(every) if (e.name, e.step) == ("saving", 20))
    seen = watching.look(RunDirectory(directory, read_only=True))
    for is_running, label in ((True, "in flight"), (False, "failures")):
        runs = runs_of({name: every[: begun + 1]}, is_running=is_running)
        now = every[begun].time_secs + 90
        middle = dataclasses.replace(seen, runs=runs, now_secs=now)
        found = lines(middle)
        assert found[label].startswith(
            "step 20, for 90 s" if is_running else "1; the last, step 20, cut off 90 s ago"
        )
        assert found["program"].startswith("running on" if is_running else "ended without close on")
        assert found["20"].startswith("in flight 90 s ago" if is_running else "cut off 90 s ago")
    found = by_label(run("watch", directory, "--once"))
    assert found["program"].startswith("closed ")
    assert found["program"].endswith(", at step 20")
    as_json = run_json("watch", directory)
    assert as_json["program"]["closed"]
    assert as_json["newest"]["step"] == 20
    assert [save["outcome"] for save in as_json["program"]["saves"]] == ["durable", "durable"]
    # Without events, the steps are what is known.
    shutil.rmtree(directory / "events")
    found = by_label(run("watch", directory))
    assert found["program"] == "no program recorded events here; only the steps are known"
    assert found["newest step"].startswith("20, durable for ")
    assert found["disk"].endswith("more steps like the newest")


def test_failures_are_said(directory: Path) -> None:
    synthetic.three_runs(directory)
    found = by_label(run("watch", directory))
    assert found["newest step"] == "none is durable yet"
    assert found["failures"].startswith("3; the last, step 1900, cut off")
    synthetic.write(directory / "b", [synthetic.run(first=0, last=50, at_secs=1e9, fails=[50])])
    assert "No space left on device." in by_label(run("watch", directory / "b"))["failures"]


def test_no_text_of_a_run_controls_the_terminal(directory: Path) -> None:
    evil = "\x1b[2J[red]"
    events = [
        Event("started", 1.0, None, {"host": evil, "pid": 1}),
        Event("saving", 2.0, 1),
        Event("failed", 3.0, 1, {"error": evil}),
    ]
    synthetic.write(directory, [events])
    text = run("watch", directory)
    assert "\x1b" not in text
    assert text.count("\\x1b[2J[red]") == 2


def test_ctrl_c_ends_well(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that fails is said in the view, and the next look may succeed."""
    synthetic.three_runs(directory)
    looks: list[Any] = []
    look = watching.look

    def looked(run: RunDirectory) -> Seen:
        looks.append(time.monotonic())
        if len(looks) == 2:
            raise OSError("stale handle")
        return look(run)

    def sleep(secs: float) -> None:
        assert secs == 0.5
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(watching, "look", looked)
    monkeypatch.setattr(watching.time, "sleep", sleep)
    monkeypatch.setattr(output, "is_watched", lambda: True)
    terminal = functools.partial(Console, force_terminal=True, width=200)
    monkeypatch.setattr(output, "console", terminal)
    result = CliRunner().invoke(app, ["watch", str(directory), "--poll", "500ms"])
    assert result.exit_code == 0, result.output
    assert len(looks) == 3
    assert "cannot be read now: stale handle" in result.output


@pytest.mark.parametrize("poll", ["0s", "soon"])
def test_an_interval_is_a_time_above_zero(directory: Path, poll: str) -> None:
    assert "watch: --poll: expected" in run(
        "watch", directory, "--poll", poll, code=exit_codes.USAGE
    )


def test_a_directory_must_exist(tmp_path: Path) -> None:
    said = run("watch", tmp_path / "x", code=exit_codes.USAGE)
    assert "no such directory" in said
