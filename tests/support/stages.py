"""Interrupts the package at its stages, named in ``torchax_ckpt/runtime/stages.py``."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from torchax_ckpt.runtime import stages
from torchax_ckpt.runtime.stages import Stage

Moment = Literal["before", "after"]


def at(
    stage: Stage,
    act: Callable[[], Any],
    *,
    when: Moment = "before",
    number: int | None = None,
    below: Path | None = None,
) -> Callable[[], None]:
    """Has ``act`` called on the thread of a stage, each time or the n-th; returns what ends that.

    In pytest it ends with the test. What ``act`` raises, the stage raises. ``below``: only of
    stages that work below this folder, as those of one tier do.
    """
    num_calls = 0

    @contextlib.contextmanager
    def observe(name: Stage, where: object) -> Iterator[None]:
        nonlocal num_calls
        is_here = name == stage and (below is None or below in Path(str(where)).parents)
        num_calls += is_here
        is_meant = is_here and number in (None, num_calls)
        if is_meant and when == "before":
            act()
        yield
        if is_meant and when == "after":
            act()

    stages.observers.append(observe)
    return lambda: stages.observers.remove(observe)


def fail_at(stage: Stage, error: Exception, **at_what: Any) -> Callable[[], None]:
    """Has a stage raise an error, as ``at`` does."""

    def fail() -> None:
        raise error

    return at(stage, fail, **at_what)


def die(*_: Any) -> None:
    """Kills this process."""
    os.kill(os.getpid(), signal.SIGKILL)


class Gate:
    """Holds a stage each time, until it is opened."""

    def __init__(self, stage: Stage, **at_what: Any) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        at(stage, self._hold, **at_what)

    def _hold(self) -> None:
        self.entered.set()
        assert self.opened.wait(60)
