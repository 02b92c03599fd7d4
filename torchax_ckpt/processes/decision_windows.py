"""Makes save decisions that are equal on all processes, without a message at every step.

Only process 0 asks the policy, and its decisions hold for all processes, even if policies, clocks
and the progress of saves differ between them. A window is a sequence of steps. During one window,
process 0 decides which steps of the next window to save, and publishes the decisions through JAX's
coordination service. The others read them in the background, and wait for one that they lack.

Process 0 predicts the steps of a window from the difference of the last two step numbers. All
processes must ask at the same steps in the same order, as a training loop does. At the first step,
and at one that was not predicted, such as that after a restore, process 0 decides when it reaches
the step. While a decision may depend on a value that only the step itself yields, such as a metric
for a best-N rule, process 0 predicts no step, and there is a message at every step.
"""

from __future__ import annotations

import collections
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from torchax_ckpt.errors import ClosedError, PolicyError, ProcessError
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.processes.messages import POLL_SECS, from_json, to_json
from torchax_ckpt.runtime.background import Executor, Flag
from torchax_ckpt.runtime.user_messages import user_line

logger = logging.getLogger(__name__)

# Long enough to receive the next window in time, and short compared with a save. The number of
# steps is limited, in case steps become slower.
_WINDOW_SECS = 0.05
_MAX_STEPS = 100
# After this many windows, a process reports which it has read, so that process 0 can delete them.
_ACKNOWLEDGED_EVERY = 64


class _Window(NamedTuple):
    """Which of some steps to save, as process 0 decided.

    If process 0 could not decide, ``error`` is its error, as JSON, which every process raises. If
    it has not predicted the steps, ``where`` is the line of the user's program that asked for the
    only step, and ``place`` is ``CallLog.place`` at that time.
    """

    bounds: Sequence[int]  # first step, end, stride
    saved: Sequence[int] = ()
    error: str = ""
    where: str = ""
    place: Sequence[Sequence[int]] = ()

    @property
    def steps(self) -> range:
        return range(*self.bounds)


class DecisionWindows:
    """The save decisions of one tier of a run, made for a window of several steps at a time.

    Process 0 calls ``decide`` with a step and the earlier steps whose saves are decided, not begun.
    """

    def __init__(self, processes: Processes, decide: Callable[[int, Sequence[int]], bool]) -> None:
        self._processes = processes
        self._decide = decide
        self._background = Executor(1, "decisions")
        self._asked = -1  # the newest step
        self._begun = (0, -1)  # the newest save: the number of restores before it, and its step
        self._stride: int | None = None
        self._window = _Window((0, 0, 1))
        self._error: Exception | None = None  # why process 0 could not decide
        self._next: Future[_Window] | None = None
        # On process 0: the windows that are not sent yet, and the newest attempt to send them.
        self._unsent: collections.deque[tuple[str, bytes]] = collections.deque()
        self._sending: Future[None] | None = None
        self._closing = threading.Event()
        self._num_windows = self._num_deleted = 0
        self._window_began = (0, 0.0)  # step and time.monotonic()

    @property
    def has_begun(self) -> bool:
        """Whether the background thread was started, which a run of one process does not need."""
        return self._num_windows > 0

    def ask(self, step: int, *, is_due: bool = False, looks_ahead: bool = True) -> bool:
        """Returns whether to save this step: equal on all processes, which ask for equal steps.

        On process 0, a step that ``is_due`` is saved, unless it was decided on before; and without
        ``looks_ahead`` no later steps are decided on, because their ``is_due`` is not known yet.

        Raises what ``decide`` raised on process 0; ProcessError if that made another call, or, on
        process 0, if it could not send decisions; PolicyError if it has not decided in time;
        ClosedError after ``close``.
        """
        if self._processes.count == 1:
            return self._decide(step, ()) or is_due
        if self._closing.is_set():
            raise ClosedError(
                f"step {step}: the processes cannot agree whether to save it, because this "
                "checkpointer is closed; call save before close()"
            )
        if self._begun == (self._processes.log.num_restores, step):
            # Whether that save has failed is not known to all at the same time.
            return False
        left, before = self._window, self._asked
        if step < before or step not in left.steps:
            self._go_on(step, is_due=is_due, looks_ahead=looks_ahead)
        if any(before < saved < step for saved in (*left.saved, *self._window.saved)):
            # A process that saves this earlier step learns that it waits in vain.
            self._processes.log.pass_by()
        if error := self._window.error:
            self._processes.log.decline()
            self._window = _Window((0, 0, 1))
            raise self._error or from_json(error.encode())
        self._asked = step
        return step in self._window.saved

    def begun(self, step: int) -> None:
        """Notes that all processes save a step now, so that ``ask`` returns False for it."""
        self._begun = self._processes.log.num_restores, step

    def close(self) -> None:
        """Waits until all messages to other processes are sent; then ends the background thread."""
        self._closing.set()
        self._background.shutdown(wait=True)
        if self._sending is not None and (error := self._sending.exception()):
            logger.warning("%s; the others may wait for them", _not_sent(error))

    def _go_on(self, step: int, *, is_due: bool, looks_ahead: bool) -> None:
        """Gets the window that contains ``step``; begins the next one if it can be predicted."""
        if self._sending is not None and self._sending.done():
            sent, self._sending = self._sending, None
            if error := sent.exception():
                raise _not_sent(error) from error
        before, following = self._asked, self._next
        is_known = following is not None and self._takes(following, step) and step >= before
        if not is_known:  # the steps differ from the prediction, so the decisions are void
            self._stride = step - before if 0 <= before < step else None
            while not self._takes(self._begin(range(step, step + 1), (), is_due=is_due), step):
                pass  # process 0 has predicted other steps
        if looks_ahead and self._stride is not None and not self._window.error:
            (last_step, last_time), now = self._window_began, time.monotonic()
            self._window_began = step, now
            num_steps = max(1, (step - last_step) // self._stride)
            secs_per_step = max((now - last_time) / num_steps, 1e-6)
            ahead = max(1, min(_MAX_STEPS, math.ceil(_WINDOW_SECS / secs_per_step)))
            first = self._window.steps[-1] + self._stride
            coming = [s for s in self._window.saved if s >= step]
            steps = range(first, first + ahead * self._stride, self._stride)
            self._next = self._begin(steps, coming, is_predicted=True)

    def _takes(self, decided: Future[_Window], step: int) -> bool:
        """Waits for a window; returns whether it has ``step``. Raises if process 0 passed that."""
        self._window, self._next = self._result(decided, step), None
        window, log = self._window, self._processes.log
        if step in window.steps:
            return True
        first = window.steps[0]
        # A process may have left out a step that is not saved.
        matters = window.where and (window.saved or first > step)
        if matters and log.has_left_out(first, window.place):
            raise log.differ(0, f"save({first}) at {window.where}")
        return False

    def _begin(
        self,
        steps: range,
        coming: Sequence[int],
        *,
        is_due: bool = False,
        is_predicted: bool = False,
    ) -> Future[_Window]:
        """Returns a future of the next window: process 0 decides and publishes it; others read."""
        number = self._num_windows
        self._num_windows += 1
        if number % _ACKNOWLEDGED_EVERY == 0:
            self._background.submit(self._acknowledge, number).add_done_callback(_log_failure)
        if not self._processes.is_first:
            return self._background.submit(self._look_up, number)
        window = self._decided(steps, coming, is_due=is_due)
        if not is_predicted:
            window = window._replace(where=user_line(), place=self._processes.log.place)
        self._unsent.append((str(number), json.dumps(window).encode()))
        self._sending = self._background.submit(self._send)
        known: Future[_Window] = Future()
        known.set_result(window)
        return known

    def _decided(self, steps: range, coming: Sequence[int], *, is_due: bool) -> _Window:
        """Asks ``decide`` for the steps of a window; an error for a later step ends the window."""
        saved: list[int] = []
        for step in steps:
            try:
                if self._decide(step, [*coming, *saved]) or is_due:
                    saved.append(step)
            except Exception as error:
                if step == steps[0]:
                    self._error = error
                    return _Window((step, step + 1, 1), error=to_json(error, 0).decode())
                return _Window((steps[0], step, steps.step), saved)
        return _Window((steps.start, steps.stop, steps.step), saved)

    def _send(self) -> None:
        """Sends the windows that are not sent yet, also those that could not be sent before."""
        while self._unsent:
            self._processes.put_note(*self._unsent[0])
            self._unsent.popleft()

    def _look_up(self, number: int) -> _Window:
        while not self._closing.is_set():
            if (message := self._processes.wait_for_note(str(number))) is not None:
                return _Window(*json.loads(message))
        raise PolicyError(
            "this process no longer waits for a save decision of process 0: the checkpointer is "
            "closed, or the program is ending"
        )

    def _result(self, window: Future[_Window], step: int) -> _Window:
        secs = self._processes.timeout_secs
        deadline = time.monotonic() + secs
        is_decided = Flag()
        window.add_done_callback(lambda _: is_decided.set())
        self._next = window  # if this fails, it comes before every later window
        while not is_decided.wait(min(deadline - time.monotonic(), POLL_SECS)):
            if (error := self._processes.log.difference([0])) is not None:
                raise error
            if time.monotonic() >= deadline:
                raise PolicyError(
                    f"process 0 has not decided whether to save step {step}, {secs:g} s after "
                    "this process asked; every process must call save at the same steps"
                )
        return window.result()

    def _acknowledge(self, number: int) -> None:
        """Reports which windows this process has read; process 0 deletes those that all have."""
        if not self._processes.is_first:
            self._processes.put_note(f"known/{self._processes.index}", str(number).encode())
            return
        known = [int(message) for message in self._processes.notes("known")]
        if len(known) == self._processes.count - 1:
            for old in range(self._num_deleted, min(known)):
                self._processes.remove_note(str(old))
            self._num_deleted = min(known)


def _not_sent(error: BaseException) -> ProcessError:
    return ProcessError(
        f"process 0 could not send the others its save decisions: {error}. It tries again with the "
        "next decisions; if this repeats, start all processes again."
    )


def _log_failure(acknowledging: Future[None]) -> None:
    if error := acknowledging.exception():  # the next one does what this one should have done
        logger.debug("save decisions that all have read are not deleted yet: %s", error)
