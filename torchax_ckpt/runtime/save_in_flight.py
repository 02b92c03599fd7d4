"""The start and the current stage of a save in flight, and how long a finished save took."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable

from torchax_ckpt.runtime.background import Flag, Task


@dataclasses.dataclass(frozen=True)
class SaveCost:
    """The times of a save, in seconds since the training thread began the save.

    Attributes:
      step: the saved step.
      blocking_secs: until the training thread continued.
      durable_secs: until the step was committed.
    """

    step: int
    blocking_secs: float
    durable_secs: float


class SaveInFlight(Task):
    """The state of one save in flight. The task's thread carries out the save.

    Attributes:
      is_known_overdue: whether a SaveTimeoutError for this save was raised.
      handed_over: set once the training thread continues.
      blocking_secs: seconds from the start of the save until the training thread continued; valid
        once ``handed_over`` is set.
      transferred: set once all arrays are on the host.

    Args:
      step: the saved step.
      began: ``time.perf_counter()`` when the training thread began the save.
      write: the function that the thread runs.
    """

    def __init__(self, step: int, began: float, write: Callable[[SaveInFlight], None]) -> None:
        super().__init__(f"save-{step}", functools.partial(write, self))
        self.step = step
        self._began = began
        self.enter("starting its thread")
        self.is_known_overdue = False
        self.handed_over = Flag()
        self.blocking_secs = 0.0
        self.transferred = Flag()

    @property
    def age_secs(self) -> float:
        """Seconds since the training thread began the save."""
        return time.perf_counter() - self._began

    def enter(self, phase: str) -> None:
        """Records that the save begins the stage ``phase``."""
        self._phase = phase, time.perf_counter()

    def where(self) -> str:
        """Returns a text that names the current stage of the save and the stage's age."""
        phase, since = self._phase
        return f"{phase}, for {time.perf_counter() - since:.1f} s"
