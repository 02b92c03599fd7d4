"""Waits for conditions, and a clock that a test turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

T0 = 1_800_000_000.0


def wait_until(is_true: Callable[[], object], timeout_secs: float = 60) -> None:
    """Polls until ``is_true()`` is true; fails after the timeout."""
    deadline = time.monotonic() + timeout_secs
    while not is_true():
        assert time.monotonic() < deadline, f"not true after {timeout_secs} s"
        time.sleep(0.01)


class Clock:
    """Time that passes only in ``sleep``; what is scheduled happens on the way.

    May stand in a module for Python's ``time``.
    """

    def __init__(self) -> None:
        self.now = T0
        self.scheduled: list[tuple[float, Callable[[], Any]]] = []

    def __call__(self) -> float:
        return self.now

    time = monotonic = __call__

    def sleep(self, secs: float) -> None:
        assert secs > 0
        self.now += secs
        for due in [s for s in self.scheduled if s[0] <= self.now - T0]:
            self.scheduled.remove(due)
            due[1]()

    @property
    def waited_secs(self) -> float:
        return self.now - T0
