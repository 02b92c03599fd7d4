"""A save as the training thread sees it: whether it is in flight, its stage, and its cost."""

from __future__ import annotations

import collections
import dataclasses
import logging
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from torchax_ckpt.errors import SaveTimeoutError
from torchax_ckpt.runtime.background import Flag, Task
from torchax_ckpt.runtime.user_messages import fields
from torchax_ckpt.telemetry.events import SaveCost

logger = logging.getLogger(__name__)

_LOGGED_SAVES = 100  # in a line of the log at the level INFO


def round_of(step: int) -> str:
    """Returns the work of the round in which the processes save a step."""
    return f"saving step {step}"


class SaveInFlight(Task):
    """One save, which its thread carries out by calling ``run``."""

    def __init__(self, step: int, began: float, run: Callable[[], object]) -> None:
        super().__init__(f"save-{step}", run)
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


class SaveCosts:
    """The costs of a tier's durable saves, for its policy, its deadline and the log."""

    def __init__(self) -> None:
        self.longest_secs: float | None = None  # until a step was durable; None if none is
        # Those that no policy has observed yet. A policy that observes none removes none.
        self._unobserved: collections.deque[SaveCost] = collections.deque(maxlen=64)
        self._unlogged: list[SaveCost] = []

    def add(self, cost: SaveCost, path: Any) -> None:
        """Adds, and logs, the cost of a save that has just become durable in ``path``."""
        self.longest_secs = max(self.longest_secs or 0.0, cost.durable_secs)
        self._unobserved.append(cost)
        _log([cost], path, logging.DEBUG)
        self._unlogged.append(cost)
        if len(self._unlogged) == _LOGGED_SAVES:
            _log(self._unlogged, path, logging.INFO)
            self._unlogged.clear()

    def observed(self) -> Iterator[SaveCost]:
        """Yields, and forgets, the costs that were added since the last call."""
        while self._unobserved:
            yield self._unobserved.popleft()


def _log(costs: list[SaveCost], path: Any, level: int) -> None:
    """Logs the medians of the costs of saves; the step is that of the last one."""
    columns = zip(*map(dataclasses.astuple, costs), strict=True)
    _, blocking, durable = map(statistics.median, columns)
    text = "%s: step %d is durable (median of %d: blocked %.4f s, durable after %.3f s)"
    step = costs[-1].step
    about = fields(step=step, path=path, blocking_secs=blocking, durable_secs=durable)
    logger.log(level, text, path, step, len(costs), blocking, durable, extra=about)
