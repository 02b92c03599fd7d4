"""Receives events from the threads of a checkpointer, and handles them on a separate thread.

``Telemetry.emit`` counts an event and puts it into a queue, which takes the caller some
microseconds. A separate thread calls the hook and writes the journal, so neither a slow hook nor
stalled storage delays training or a save.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import os
import platform
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeAlias

import jax
from etils import epath

from torchax_ckpt.layout.manifest import installed_versions
from torchax_ckpt.runtime.background import Task
from torchax_ckpt.runtime.save_in_flight import SaveCost
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.stored.shared_files import Usage
from torchax_ckpt.telemetry.events import Event, bounded
from torchax_ckpt.telemetry.journal import Journal
from torchax_ckpt.telemetry.stats import Stats, Tally

logger = logging.getLogger(__name__)

# The most events that wait for the hook, and the most lines that wait for the journal. Beyond that,
# the newest events and the oldest lines are dropped.
_MAX_WAITING = 10_000
_REACHED_SECS = 60.0
_RETRY_SECS = 30.0
_CLOSING_SECS = 10.0
_END = None

_Params = ParamSpec("_Params")
# An event, the steps of the run after it if it changes them, and the bytes that a save reused.
_Taken: TypeAlias = tuple[Event, Sequence[CommittedStep] | None, int]


def _logs_errors(method: Callable[_Params, None]) -> Callable[_Params, None]:
    """Wraps a method so that its errors are logged and never reach the training or a save."""

    @functools.wraps(method)
    def logging_errors(*args: _Params.args, **kwargs: _Params.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            logger.warning(
                "an event is dropped after an error; training and saves go on", exc_info=True
            )

    return logging_errors


class Telemetry:
    """Receives and counts the events of one checkpointer.

    Args:
      directory: the directory of the run. It is written to only between ``open`` and ``close``.
      on_event: called with each event, in order, on one separate thread.
      keeps: the rules of the preservation policy as data, for reports on the directory.
    """

    def __init__(
        self,
        directory: epath.Path,
        on_event: Callable[[Event], None] | None = None,
        keeps: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._tally = Tally()
        self._lock = threading.RLock()  # a signal handler may call stats in the middle of emit
        self._keeps = list(keeps)
        self._worker = _Worker(directory, on_event, self._tally, self._lock)
        self._task: Task | None = None
        self._has_thread = on_event is not None
        self._is_open = self._is_closed = False
        self._num_reported = 0  # skipped saves that events have reported
        self._saving: tuple[float, int] | None = None

    @property
    def has_thread(self) -> bool:
        """True if a thread that delivers or writes events was started."""
        return self._task is not None

    def skipped(self, step: int) -> None:
        """Keeps ``step``, which training has reached, and counts one more step that was not saved.

        ``skipped`` records no event itself. Later events report the step and the count.
        """
        worker = self._worker
        worker.num_skipped += 1
        worker.step = step

    @_logs_errors
    def saving(self, step: int, began: float) -> None:
        """Records that a save began at ``began``, of ``time.perf_counter()``.

        On the training thread, ``saving`` would make training wait while other threads wake up.
        """
        values: dict[str, Any] = {}
        if self._saving is not None:
            last_began, last_step = self._saving
            values = {"interval_secs": began - last_began, "num_steps": max(0, step - last_step)}
        self._saving = began, step
        worker = self._worker
        num_skipped = worker.num_skipped
        worker.step = max(step, worker.step or 0)
        ago_secs = time.perf_counter() - began
        num_new = num_skipped - self._num_reported
        self._take("saving", step, ago_secs, {**values, "num_skipped": num_new})
        self._num_reported = num_skipped

    @_logs_errors
    def durable(self, cost: SaveCost, reused_bytes: int, steps: Sequence[CommittedStep]) -> None:
        """Records that a step was committed.

        The save took ``reused_bytes`` of the step over from an earlier step; ``steps`` are those of
        the run now, of which the event thread lists the files of the new one.
        """
        values = {"blocking_secs": cost.blocking_secs, "durable_secs": cost.durable_secs}
        self._take("durable", cost.step, 0.0, values, steps, reused_bytes)

    @_logs_errors
    def steps_gone(self, name: str, gone: Sequence[int], steps: Sequence[CommittedStep]) -> None:
        """Records ``deleted`` or ``set_aside``, unless no steps are gone; ``steps`` are left."""
        if gone:
            self._take(name, None, 0.0, {"steps": list(gone)}, steps)

    @_logs_errors
    def emit(self, name: str, step: int | None = None, **values: Any) -> None:
        """Records an event that happened just now."""
        self._take(name, step, 0.0, values)

    def _take(
        self,
        name: str,
        step: int | None,
        ago_secs: float,
        values: dict[str, Any],
        steps: Sequence[CommittedStep] | None = None,
        reused_bytes: int = 0,
    ) -> None:
        event = Event(name, time.time() - ago_secs, step, bounded(values))
        with self._lock:
            self._tally.take(event)
            if self._is_closed or self._worker.queue.qsize() >= _MAX_WAITING:
                return
            self._worker.queue.put((event, steps, reused_bytes))
            self._start()

    @_logs_errors
    def open(self, steps: Sequence[CommittedStep]) -> None:
        """Lets process 0 write events to the directory, because the run now holds the lease.

        ``steps`` are those of the run.
        """
        if jax.process_index() != 0:
            return  # only process 0 writes; each process calls its own hook
        with self._lock:
            is_new, self._is_open = not self._is_open, True
            self._has_thread = True
        self._worker.may_write = True
        if is_new:
            values = {
                "host": platform.node(),
                "pid": os.getpid(),
                "version": installed_versions()["torchax_ckpt"],
                "keeps": self._keeps,
            }
            self._take("started", None, 0.0, values, steps)

    def lost(self) -> None:
        """Stops writing events, because another program has taken the directory's lease.

        The hook still receives the events of saves and restores.
        """
        self._worker.may_write = False

    def close(self) -> None:
        """Waits until all events are delivered and written, but for at most 10 seconds."""
        if os.getpid() != self._worker.pid:
            return  # this process was forked from the one that writes
        with self._lock:  # two threads may close at the same time
            if self._is_open and not self._is_closed:
                self.emit("closed", self._worker.step, num_skipped=self._worker.num_skipped)
            self._is_closed = True
            task = self._task
        self._worker.queue.put(_END)
        if task is None or task.thread_id == threading.get_ident():  # a hook may call close, too
            return
        if not task.ended.wait(_CLOSING_SECS):
            logger.warning(
                "%s: the last events are still being delivered or written after %.0f s; "
                "the checkpointer closes without waiting for them",
                self._worker.directory,
                _CLOSING_SECS,
            )

    def stats(self) -> Stats:
        """Returns the statistics of the events received so far."""
        with self._lock:
            return self._tally.stats(self._worker.num_skipped)

    def _start(self) -> None:
        if self._task is not None or not self._has_thread or self._is_closed:
            return
        self._task = Task("events", self._worker.run)
        try:
            self._task.start()
        except RuntimeError as error:  # no more threads, or the interpreter is shutting down
            self._task, self._has_thread = None, False
            logger.warning("events are neither delivered nor written; no thread starts: %s", error)


class _Worker:
    """Calls the hook and writes the journal, on a thread that ``Telemetry`` starts for this."""

    def __init__(
        self,
        directory: epath.Path,
        on_event: Callable[[Event], None] | None,
        tally: Tally,
        lock: contextlib.AbstractContextManager[Any],
    ) -> None:
        self.directory = directory
        self._tally, self._lock = tally, lock
        self.pid = os.getpid()
        # A SimpleQueue, because the garbage collector may call put in the middle of another put.
        self.queue: queue.SimpleQueue[_Taken | None] = queue.SimpleQueue()
        self.may_write = False
        self.step: int | None = None
        self.num_skipped = 0
        self._on_event = on_event
        self._is_hook_broken = self._is_journal_broken = self._is_line_broken = False
        self._journal = Journal(directory, secrets.token_hex(4))
        self._usage = Usage()
        self._lines: collections.deque[bytes] = collections.deque(maxlen=_MAX_WAITING)
        self._due_secs = 0.0
        self._reported_step: int | None = None
        self._reported_secs = 0.0

    def run(self) -> None:
        """Passes events from the queue to the hook and the journal, until the end marker comes.

        ``Telemetry.close`` puts the end marker into the queue.
        """
        is_ending = False
        while not is_ending:
            is_ending = self._take()
            self._report_reached()
            if self._lines and self.may_write and (is_ending or time.monotonic() >= self._due_secs):
                self._write()

    def _take(self) -> bool:
        """Waits until an event comes or the journal must be written; passes events to the hook.

        Returns True once the end marker has come from the queue.
        """
        waits = self._lines and self.may_write
        secs = max(0.0, self._due_secs - time.monotonic()) if waits else _REACHED_SECS
        try:
            taken = self.queue.get(timeout=secs)
            while taken is not _END:
                event, steps, reused_bytes = taken
                if steps is not None and self.may_write:  # only process 0 measures
                    event = self._measured(event, steps, reused_bytes)
                self._deliver(event)
                self._enqueue_line(event)
                if event.step is not None:
                    self._reported_step, self._reported_secs = event.step, time.monotonic()
                taken = self.queue.get_nowait()
        except queue.Empty:
            return False
        return True

    def _measured(self, event: Event, steps: Sequence[CommittedStep], reused_bytes: int) -> Event:
        """Returns an event with the bytes of its step and of all steps, as far as storage answers.

        Only the files of steps that no earlier event had are listed.
        """
        try:
            self._usage.update(steps)
        except Exception as error:  # bucket clients raise errors of their own
            logger.debug("%s: the bytes of steps are not known: %s", self.directory, error)
            return event
        sizes = {"total_bytes": self._usage.total_bytes}
        new = next((s for s in reversed(steps) if s.step == event.step), None)
        if new is not None and (num_bytes := self._usage.num_bytes(new)):  # 0: deleted meanwhile
            sizes |= {"num_bytes": num_bytes, "new_bytes": max(0, num_bytes - reused_bytes)}
        with self._lock:
            for key, value in sizes.items():
                self._tally.measured(event.name, key, value)
        return dataclasses.replace(event, values={**event.values, **sizes})

    def _deliver(self, event: Event) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(event)
            self._is_hook_broken = False
        except BaseException:  # a hook may raise SystemExit, which must not end this thread
            # Logged as an error only once until the hook works again, because the hook may be
            # called several times a second.
            level = logging.DEBUG if self._is_hook_broken else logging.ERROR
            logger.log(level, "on_event failed with %s; saving goes on", event, exc_info=True)
            self._is_hook_broken = True

    def _report_reached(self) -> None:
        """Records the event ``reached``, if it is due, with the latest step that training reached.

        The event is due if no event of the last minute had a step number and this step is new.
        """
        is_due = time.monotonic() - self._reported_secs >= _REACHED_SECS
        if self.may_write and is_due and self.step != self._reported_step:
            event = Event("reached", time.time(), self.step, {"num_skipped": self.num_skipped})
            self._reported_step, self._reported_secs = self.step, time.monotonic()
            self._deliver(event)
            self._enqueue_line(event)

    def _enqueue_line(self, event: Event) -> None:
        try:
            self._lines.append(event.to_line())
        except Exception as error:  # the hook may have changed the event
            level = logging.DEBUG if self._is_line_broken else logging.WARNING
            logger.log(level, "%s cannot be written as JSON and is dropped: %s", event, error)
            self._is_line_broken = True

    def _write(self) -> None:
        lines = list(self._lines)
        try:
            self._journal.append(lines)
        except Exception as error:  # bucket clients raise errors of their own
            level = logging.DEBUG if self._is_journal_broken else logging.WARNING
            text = "%s: events cannot be written for now, but saves go on: %s"
            logger.log(level, text, self.directory, error)
            self._is_journal_broken = True
            self._due_secs = time.monotonic() + _RETRY_SECS
        else:
            self._lines.clear()
            self._is_journal_broken = False
            self._due_secs = time.monotonic() + self._journal.patience_secs
