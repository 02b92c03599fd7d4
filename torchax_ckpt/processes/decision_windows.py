"""Owns how processes agree on when to save, without asking each other at every step.

Process 0 asks the policy for all, some steps ahead: while one window of steps goes by, it decides
on the next one and says so through JAX's coordination service, and the others look it up in the
background. So policies need not be the same everywhere, nor clocks, nor how far a save has come.
Who reaches the end of what it knows waits, and nobody ever guesses.

Which steps a window will hold is foreseen from the last two. Every process must ask at the same
steps, in the same order, as training does; where they come differently, at the start and after
going back, all wait for process 0 to decide anew.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torchax_ckpt.errors import ClosedError, PolicyError
from torchax_ckpt.processes.coordination import Processes

# How long a window lasts: enough to hear of the next one before it comes, and little beside the
# time that a save takes; and how many steps it holds at most, should they become slower.
_WINDOW_SECS = 0.05
_MAX_STEPS = 100
# How often processes say what they have looked up, so that it can be deleted; in windows.
_ACKNOWLEDGED_EVERY = 64

_closing = threading.Event()
# Ends the look-ups before the interpreter joins their threads: the newest hook is called first, and
# that of concurrent.futures is registered by importing from it above.
threading._register_atexit(_closing.set)  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class _Window:
    """Steps that were decided on: from the first to the last, and which of them are saved."""

    first: int
    last: int
    stride: int
    saved: Sequence[int]

    def holds(self, step: int) -> bool:
        return self.first <= step <= self.last and (step - self.first) % self.stride == 0


class DecisionWindows:
    """The appointments of one checkpointer.

    Args:
      processes: of the run; one more conversation with them.
      decide: whether to save a step, given the steps before it that are to be saved and are not
        begun yet; called on process 0 alone.
    """

    def __init__(self, processes: Processes, decide: Callable[[int, Sequence[int]], bool]) -> None:
        self._processes = processes
        self._decide = decide
        self._background = ThreadPoolExecutor(1, "appointments")
        self._asked, self._answer = -1, False
        self._stride: int | None = None
        self._window = _Window(0, -1, 1, ())
        self._next: Future[_Window] | None = None
        self._closing = threading.Event()
        self._count = self._num_deleted = 0  # of windows
        self._since = (0, 0.0)  # step and time at which the window before was begun

    def ask(self, step: int) -> bool:
        """Whether to save this step; the same everywhere.

        Raises:
          PolicyError: process 0 has not decided, long after this process came to this step.
          ClosedError: after ``close``.
        """
        if self._closing.is_set():
            raise ClosedError(
                f"step {step}: processes no longer agree on what to save, as this checkpointer is "
                "closed"
            )
        if step == self._asked:
            return self._answer
        if step < self._asked or not self._window.holds(step):
            self._go_on(step)
        self._asked, self._answer = step, step in self._window.saved
        return self._answer

    def keep(self) -> None:
        """The appointment at the step that was asked for last is kept, and over."""
        self._answer = False

    def close(self) -> None:
        """Ends the background thread, after this process has sent what others wait for."""
        self._closing.set()
        self._background.shutdown(wait=True)

    def _go_on(self, step: int) -> None:
        """Turns to the window of a step, and sees to the next one."""
        following, self._next = self._next, None
        if following is not None:
            self._window = self._result(following, step)
        if following is None or step < self._asked or not self._window.holds(step):
            # Not foreseen: whatever was decided is void.
            self._stride = step - self._asked if 0 <= self._asked < step else None
            self._window = self._result(self._begin(step, step, []), step)
        if self._stride is not None:
            (last_step, last_time), self._since = self._since, (step, time.monotonic())
            num_steps = max(1, (step - last_step) // self._stride)
            secs_per_step = max((self._since[1] - last_time) / num_steps, 1e-6)
            ahead = max(1, min(_MAX_STEPS, math.ceil(_WINDOW_SECS / secs_per_step)))
            first = self._window.last + self._stride
            last = first + (ahead - 1) * self._stride
            self._next = self._begin(first, last, [s for s in self._window.saved if s >= step])

    def _begin(self, first: int, last: int, saved: list[int]) -> Future[_Window]:
        """Decides on a window and tells the others, or begins to look it up.

        Args:
          first, last: its steps; of no meaning where they are looked up.
          saved: steps before it that are to be saved and are not begun yet.
        """
        number = self._count
        self._count += 1
        if number % _ACKNOWLEDGED_EVERY == 0:
            self._background.submit(self._acknowledge, number)
        if not self._processes.is_first:
            return self._background.submit(self._look_up, number)
        decided: list[int] = []
        stride = self._stride or 1
        for step in range(first, last + 1, stride):
            if self._decide(step, [*saved, *decided]):
                decided.append(step)
        window = _Window(first, last, stride, decided)
        message = json.dumps(dataclasses.astuple(window)).encode()
        self._background.submit(self._processes.put, str(number), message)
        known: Future[_Window] = Future()
        known.set_result(window)
        return known

    def _look_up(self, number: int) -> _Window:
        while not (_closing.is_set() or self._closing.is_set()):
            if (message := self._processes.look(str(number))) is not None:
                return _Window(*json.loads(message))
        raise PolicyError("the checkpointer is closed, or the program is ending")

    def _result(self, window: Future[_Window], step: int) -> _Window:
        secs = self._processes.timeout_secs
        try:
            return window.result(secs)
        except TimeoutError:
            raise PolicyError(
                f"process 0 has not decided whether to save step {step}, {secs:g} s after this "
                "process came to it; every process must call save at the same steps"
            ) from None

    def _acknowledge(self, number: int) -> None:
        """Says that everything before a window is known here; process 0 deletes what all know."""
        if not self._processes.is_first:
            self._processes.put(f"known/{self._processes.index}", str(number).encode())
            return
        known = [int(message) for message in self._processes.there("known")]
        if len(known) == self._processes.count - 1:
            for old in range(self._num_deleted, min(known)):
                self._processes.remove(str(old))
            self._num_deleted = min(known)
