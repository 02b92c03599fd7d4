"""A save in flight, with reports if it takes longer than is expected; the log of failed saves."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from torchax_ckpt.errors import CheckpointError, SaveTimeoutError
from torchax_ckpt.runtime.background import Flag, Task
from torchax_ckpt.runtime.user_messages import fields

logger = logging.getLogger(__name__)

# Called on the thread of a save once its step is durable. They neither wait nor raise.
on_durable: list[Callable[[], None]] = []


@dataclasses.dataclass(frozen=True)
class SaveCost:
    """The times of a save, in seconds since the training thread began the save."""

    step: int
    blocking_secs: float  # until the training thread continued
    durable_secs: float  # until the step was committed


class SaveInFlight(Task):
    """The state of one save in flight, which the task's thread carries out by calling ``write``."""

    def __init__(self, step: int, began: float, write: Callable[[SaveInFlight], None]) -> None:
        super().__init__(f"save-{step}", functools.partial(write, self))
        self.step = step
        self._began = began  # a ``time.perf_counter()``
        self.enter("starting its thread")
        self.is_known_overdue = False  # whether a SaveTimeoutError for this save was raised
        self.handed_over = Flag()  # set once the training thread continues
        self.blocking_secs = 0.0  # from ``began`` until then
        self.transferred = Flag()  # set once all arrays are on the host

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

    def timeout_error(self, path: Any) -> SaveTimeoutError:
        """Returns the error of a caller that has waited too long for this save to ``path``."""
        return SaveTimeoutError(
            f"the save of step {self.step} to {path} is still in flight after "
            f"{self.age_secs:.2f} s. Current stage: {self.where()}. The save continues; earlier "
            "steps are intact.",
            step=self.step,
            path=path,
        )

    def watch(self, limit_secs: float, path: Any) -> None:
        """Has a thread log stage and call stack after 1, 2, 4, 8, ... times ``limit_secs``."""

        def run() -> None:
            secs = limit_secs
            while not self.ended.wait(secs - self.age_secs):
                if self.age_secs >= secs:
                    frame = sys._current_frames().get(self.thread_id)
                    stack = "".join(traceback.format_stack(frame)) if frame else "unknown"
                    logger.error("%s Stack of its thread:\n%s", self.timeout_error(path), stack)
                    secs *= 2

        try:
            Task(f"watch-save-{self.step}", run).start()
        except RuntimeError as error:
            text = "the save of step %d is not reported if it takes longer than %g s: %s"
            logger.warning(text, self.step, limit_secs, error)


class FailureLog:
    """The failures of background work; ``unread`` were not raised to the user yet."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self.unread: list[CheckpointError] = []

    def report(self, failure: CheckpointError, action: str = "", kind: str = "") -> None:
        """Logs a failure, and keeps it until ``raise_oldest`` raises it.

        A failure is a repetition if the last one of the same action had the same kind (the same
        remedy), and ``over`` was not called since. Repetitions are logged at level DEBUG instead of
        ERROR, and not kept while earlier failures wait to be raised.
        """
        is_known = bool(action) and self._known.get(action) == kind
        level = logging.DEBUG if is_known else logging.ERROR
        logger.log(level, "%s", failure, extra=fields(step=failure.step, path=failure.path))
        if action:
            self._known[action] = kind
        if not is_known or not self.unread:
            self.unread.append(failure)

    def over(self, action: str) -> None:
        """Records that the action succeeded, so that its next failure counts as new."""
        self._known.pop(action, None)

    def raise_oldest(self, kind: type[CheckpointError] = CheckpointError) -> None:
        """Raises the oldest failure of this class that was not raised yet; nothing without one."""
        for failure in self.unread:
            if isinstance(failure, kind):
                self.unread.remove(failure)
                raise failure
