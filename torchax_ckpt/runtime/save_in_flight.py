"""Owns what is known of a save that is being written: since when, where it stands, what it cost."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class SaveCost:
    """What a save took, in seconds from when the training thread turned to it.

    Attributes:
      step: the step saved.
      blocking_secs: until the training thread went on.
      durable_secs: until the step was committed.
    """

    step: int
    blocking_secs: float
    durable_secs: float


class SaveInFlight:
    """A save that is being written.

    Args:
      step: the step saved.
      began: ``time.perf_counter()`` when the training thread turned to it.
      write: what its thread does.
    """

    def __init__(self, step: int, began: float, write: Callable[[SaveInFlight], None]) -> None:
        self.step = step
        self._began = began
        self.enter("starting its thread")
        self.is_known_overdue = False
        self.handed_over = threading.Event()
        self.blocking_secs = 0.0
        self.transferred = threading.Event()
        self.thread = threading.Thread(target=write, args=(self,), name=f"save-{step}", daemon=True)

    @property
    def age_secs(self) -> float:
        """Seconds since the training thread turned to it."""
        return time.perf_counter() - self._began

    def enter(self, phase: str) -> None:
        """Notes what it is at from now on."""
        self._phase = phase, time.perf_counter()

    def where(self) -> str:
        """What it is at, and for how long."""
        phase, since = self._phase
        return f"{phase}, for {time.perf_counter() - since:.1f} s"
