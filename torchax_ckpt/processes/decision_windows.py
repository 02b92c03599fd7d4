"""Makes save decisions that are equal on all processes, without a message at every step.

Only process 0 asks the policy, and its decisions hold for all processes, even if policies, clocks
and the progress of saves differ between them. A window is a sequence of steps. During one window,
process 0 decides which steps of the next window to save, and publishes the decisions through JAX's
coordination service. The others read them in the background, and wait for one that they lack.

Process 0 predicts the steps of a window from the difference of the last two step numbers. All
processes must ask at the same steps in the same order, as a training loop does. At the first step,
and at one that was not predicted, such as that after a restore, process 0 decides when it reaches
the step. While a decision may depend on what only the step itself brings, such as a metric for a
best-N rule, process 0 predicts no step, and there is a message at every step.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from torchax_ckpt.errors import ClosedError, PolicyError, ProcessError
from torchax_ckpt.processes.call_log import different
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.processes.messages import POLL_SECS, from_json, to_json
from torchax_ckpt.runtime.background import Executor, Flag

logger = logging.getLogger(__name__)

# Long enough to receive the next window in time, and short compared with a save. The number of
# steps is limited, in case steps become slower.
_WINDOW_SECS = 0.05
_MAX_STEPS = 100
# After this many windows, a process reports which it has read, so that process 0 can delete them.
_ACKNOWLEDGED_EVERY = 64


@dataclasses.dataclass(frozen=True)
class _DecisionWindow:
    """Which of the steps ``first``, ``first + stride`` and so on to ``last`` to save.

    If process 0 could not decide, ``error`` is its error, as JSON, which every process raises. If
    not ``is_predicted``, process 0 has asked for the step ``first``, after ``num_restores``
    restores.
    """

    first: int
    last: int
    stride: int
    saved: Sequence[int]
    error: str = ""
    is_predicted: bool = False
    num_restores: int = 0

    def holds(self, step: int) -> bool:
        return self.first <= step <= self.last and (step - self.first) % self.stride == 0


_NOTHING = _DecisionWindow(0, -1, 1, ())


class DecisionWindows:
    """The save decisions of one tier of a run, made for a window of several steps at a time.

    Process 0 calls ``decide`` with a step and the earlier steps whose saves are decided, not begun.
    """

    def __init__(self, processes: Processes, decide: Callable[[int, Sequence[int]], bool]) -> None:
        self._processes = processes
        self._decide = decide
        self._background = Executor(1, "decisions")
        self._asked, self._answer = -1, False
        self._due: int | None = None  # the step that is saved whatever ``decide`` says
        self._num_restores = 0  # at the newest step that was asked for
        self._stride: int | None = None
        self._window = _NOTHING
        self._error: Exception | None = None  # why process 0 could not decide
        self._next: Future[_DecisionWindow] | None = None
        # On process 0: the windows that are not sent yet, and the newest attempt to send them.
        self._unsent: collections.deque[tuple[str, bytes]] = collections.deque()
        self._sending: Future[None] | None = None
        self._closing = threading.Event()
        self._has_differed = False  # whether this process's newest step was not process 0's
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
        restores = self._processes.log.num_restores
        if (restores, step) == (self._num_restores, self._asked):
            return self._answer
        self._num_restores = restores
        self._due = step if is_due else None
        left = self._window
        if step < self._asked or not self._window.holds(step):
            self._go_on(step, looks_ahead=looks_ahead)
        if any(self._asked < saved < step for saved in (*left.saved, *self._window.saved)):
            # Process 0, if it saves this earlier step, learns that it waits in vain.
            self._processes.log.at(step)
        if self._window.error:
            error, self._window = self._window.error, _NOTHING
            raise self._error or from_json(error.encode())
        self._asked, self._answer = step, step in self._window.saved
        return self._answer

    def keep(self) -> None:
        """Records that the last step that ``ask`` got is now being saved: it then returns False."""
        self._answer = False

    def close(self) -> None:
        """Waits until all messages to other processes are sent; then ends the background thread."""
        self._closing.set()
        self._background.shutdown(wait=True)
        if self._sending is not None and (error := self._sending.exception()):
            logger.warning("%s; the others may wait for them", _not_sent(error))

    def _go_on(self, step: int, *, looks_ahead: bool) -> None:
        """Gets the window that contains ``step``; begins the next one if it can be predicted."""
        if self._sending is not None and self._sending.done():
            sent, self._sending = self._sending, None
            if error := sent.exception():
                raise _not_sent(error) from error
        following, self._next = self._next, None
        if following is not None:
            self._window = self._result(following, step)
        if following is None or step < self._asked or not self._window.holds(step):
            # The steps differ from the prediction, so the decisions are void.
            self._stride = step - self._asked if 0 <= self._asked < step else None
            is_new = False
            while not (is_new and self._window.holds(step)):  # once on process 0
                if self._rules_out(step, is_new=is_new):
                    self._has_differed = True
                    log = self._processes.log
                    mine = log.refuse(f"save({step})", step)  # tells process 0 of the step
                    theirs = f"save({self._window.first})"
                    raise different(self._processes.index, mine.text, 0, theirs)
                self._window = self._result(self._begin(step, step, []), step)
                is_new = True
            self._has_differed = False
        if looks_ahead and self._stride is not None and not self._window.error:
            (last_step, last_time), now = self._window_began, time.monotonic()
            self._window_began = step, now
            num_steps = max(1, (step - last_step) // self._stride)
            secs_per_step = max((now - last_time) / num_steps, 1e-6)
            ahead = max(1, min(_MAX_STEPS, math.ceil(_WINDOW_SECS / secs_per_step)))
            first = self._window.last + self._stride
            last = first + (ahead - 1) * self._stride
            coming = [s for s in self._window.saved if s >= step]
            self._next = self._begin(first, last, coming, is_predicted=True)

    def _begin(
        self, first: int, last: int, saved: list[int], *, is_predicted: bool = False
    ) -> Future[_DecisionWindow]:
        """Returns a future of the next window: process 0 decides and publishes it; others read."""
        number = self._num_windows
        self._num_windows += 1
        if number % _ACKNOWLEDGED_EVERY == 0:
            self._background.submit(self._acknowledge, number).add_done_callback(_log_failure)
        if not self._processes.is_first:
            return self._background.submit(self._look_up, number)
        restores = self._processes.log.num_restores
        window = dataclasses.replace(
            self._decided(first, last, saved), is_predicted=is_predicted, num_restores=restores
        )
        message = json.dumps(dataclasses.astuple(window)).encode()
        self._unsent.append((str(number), message))
        self._sending = self._background.submit(self._send)
        known: Future[_DecisionWindow] = Future()
        known.set_result(window)
        return known

    def _decided(self, first: int, last: int, saved: list[int]) -> _DecisionWindow:
        """Asks ``decide`` for the steps of a window; an error for a later step ends the window."""
        decided: list[int] = []
        stride = self._stride or 1
        for step in range(first, last + 1, stride):
            try:
                if self._decide(step, [*saved, *decided]) or step == self._due:
                    decided.append(step)
            except Exception as error:
                if step == first:
                    self._error = error
                    return _DecisionWindow(first, first, stride, (), to_json(error, 0).decode())
                return _DecisionWindow(first, step - stride, stride, decided)
        return _DecisionWindow(first, last, stride, decided)

    def _send(self) -> None:
        """Sends the windows that are not sent yet, also those that could not be sent before."""
        while self._unsent:
            self._processes.put_note(*self._unsent[0])
            self._unsent.popleft()

    def _look_up(self, number: int) -> _DecisionWindow:
        while not self._closing.is_set():
            if (message := self._processes.wait_for_note(str(number))) is not None:
                return _DecisionWindow(*json.loads(message))
        raise PolicyError(
            "this process no longer waits for a save decision of process 0: the checkpointer is "
            "closed, or the program is ending"
        )

    def _result(self, window: Future[_DecisionWindow], step: int) -> _DecisionWindow:
        secs, log = self._processes.timeout_secs, self._processes.log
        deadline = time.monotonic() + secs
        is_decided = Flag()
        window.add_done_callback(lambda _: is_decided.set())
        while not is_decided.wait(min(deadline - time.monotonic(), POLL_SECS)):
            self._next = window  # comes before every later window
            if (error := log.difference(log.at(step), [0])) is not None:
                raise error
            if time.monotonic() >= deadline:
                raise PolicyError(
                    f"process 0 has not decided whether to save step {step}, {secs:g} s after "
                    "this process asked; every process must call save at the same steps"
                )
        return window.result()

    def _rules_out(self, step: int, *, is_new: bool) -> bool:
        """Returns whether process 0, which asked for another step, asks for ``step`` no more."""
        window = self._window
        if window.is_predicted or window.num_restores < self._processes.log.num_restores:
            return False
        is_left_out = self._asked < window.first > step
        return is_left_out or (is_new and not (self._has_differed and window.last < step))

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
