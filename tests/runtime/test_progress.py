"""Progress: a bar where a person watches, and nothing where nobody does."""

from __future__ import annotations

import io
import math
import re
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stages import at
from support.training import mlp, save, save_state

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.cli.convert import export
from torchax_ckpt.cli.prune import copy
from torchax_ckpt.runtime import progress
from torchax_ckpt.runtime.background import Task


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Somebody watches from now on, and sees even what takes no time.

    No fixture: pytest puts its own stderr in place once fixtures are there.
    """
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_DELAY_SECS", 0.0)
    monkeypatch.setattr(progress, "_REFRESH_SECS", 0.001)
    return terminal


def test_nobody_watches_a_log_and_what_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress.bar("reading", lambda: 10) as on_bytes:
        on_bytes(10)
    assert terminal.getvalue().strip() == ""
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with progress.bar("reading", lambda: 1 // 0) as on_bytes:  # nobody asks how much it is
        on_bytes(10)
    task = Task("sleeping", lambda: time.sleep(0.01))
    task.start()
    progress.wait(task.ended, lambda: math.inf, lambda: str(1 // 0))
    assert task.ended.is_set
    assert log.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)  # as in a program without a console
    assert not progress.is_watched()


@pytest.mark.parametrize("kind", ["closed", "writer"])
def test_an_odd_stream_is_no_terminal_and_harms_nothing(
    kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    # What programs put in place of a stream writes, and no more.
    writer = types.SimpleNamespace(write=len, flush=lambda: None)
    monkeypatch.setattr(sys, "stderr", closed if kind == "closed" else writer)
    save(directory, mlp(), step=3)
    with TorchaxCheckpointer(directory) as ckpt:  # nobody holds the lease any more
        assert ckpt.attach(mlp()) == 3
        ckpt.verify(3)
        ckpt.load(3)
        ckpt.save(4, force=True)


def test_a_bar_shows_how_far_it_is_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    before = set(threading.enumerate())
    with progress.bar("reading step 5", lambda: 4000) as on_bytes:
        for _ in range(4):
            time.sleep(0.11)  # it is drawn ten times a second
            on_bytes(1000)
    text = terminal.getvalue()
    assert "reading step 5" in text
    assert "2.00k/4.00k" in text
    assert text.endswith("\r")  # nothing is left on the screen
    assert set(threading.enumerate()) <= before  # those of an earlier test may end meanwhile


def test_copies_and_exports_show_a_bar(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    save_state(directory, {"w": np.zeros(1000, np.float32)}, step=3)
    kept, out = directory.with_name("kept"), directory.with_name("out")
    copy(str(directory), str(kept), as_json=True)
    assert re.search(r"\rcopying: ", terminal.getvalue())
    forms: Any = (("safetensors", "writing"), ("pt", "reading step 3"), ("dcp", "reading"))
    for format, said in forms:
        before, target = len(terminal.getvalue()), str(out / f"of.{format}")
        export(str(directory), ["3", target], format=format, at="state", as_json=True)
        assert re.search(rf"\r{said}", terminal.getvalue()[before:])


def test_what_takes_time_shows_a_bar(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    at("write the arrays", lambda: time.sleep(0.3))
    save(directory, mlp(), step=3)
    assert "finishing the save of step 3: " in terminal.getvalue()
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        assert "reading step 3" in terminal.getvalue()
        ckpt.verify(3)
        assert re.search(r"\rstep 3: ", terminal.getvalue())
