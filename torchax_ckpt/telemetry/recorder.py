"""Owns how events are taken where things happen, and told and written elsewhere.

``emit`` costs the thread that calls it some microseconds: it counts, and hands over. A thread of
its own calls the hook and writes the journal, so neither a slow hook nor a medium that stands still
costs training or a save anything.
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
from typing import Any, ParamSpec

import jax
from etils import epath

from torchax_ckpt.layout.manifest import installed_versions
from torchax_ckpt.runtime.save_in_flight import SaveCost
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import containment
from torchax_ckpt.telemetry.events import MAX_STEPS, Event, bounded
from torchax_ckpt.telemetry.journal import Journal
from torchax_ckpt.telemetry.stats import Stats, Tally

logger = logging.getLogger(__name__)

# Events that wait for a hook, or lines for a medium; beyond it the newest, or the oldest, go.
_MAX_WAITING = 10_000
_REACHED_SECS = 60.0
_RETRY_SECS = 30.0
_CLOSING_SECS = 10.0
_END = None

_Params = ParamSpec("_Params")


def _harmless(tell: Callable[_Params, None]) -> Callable[_Params, None]:
    """What goes wrong in it is logged: training and saves, whose threads call it, go on."""

    @functools.wraps(tell)
    def told(*args: _Params.args, **kwargs: _Params.kwargs) -> None:
        try:
            tell(*args, **kwargs)
        except Exception:
            logger.warning("an event is left out, which harms nothing else", exc_info=True)

    return told


class Telemetry:
    """Takes the events of one checkpointer.

    Args:
      directory: of the run; written to between ``open`` and ``close``.
      on_event: called with each event, on one thread of its own, in their order.
      keeps: the preservation policy as data, for who looks at the directory later.
    """

    def __init__(
        self,
        directory: RunDirectory,
        on_event: Callable[[Event], None] | None = None,
        keeps: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._tally = Tally()
        self._lock = threading.RLock()  # a signal handler may ask for stats in the middle of emit
        self._keeps = list(keeps)
        self._worker = _Worker(directory, on_event, self._tally, self._lock)
        self._thread: threading.Thread | None = None
        self._has_thread = on_event is not None
        self._is_open = self._is_closed = False
        self._num_told = 0  # skipped calls that an event has told of
        self._saving: tuple[float, int] | None = None

    @property
    def has_thread(self) -> bool:
        """Whether a thread tells or writes events."""
        return self._thread is not None

    def skipped(self, step: int) -> None:
        """The training has reached a step, and it is not saved."""
        worker = self._worker
        worker.num_skipped += 1
        worker.step = step

    @_harmless
    def saving(self, step: int, began: float) -> None:
        """A save has begun; called off the training thread, which would wait for others to wake.

        Args:
          step: the step saved.
          began: ``time.perf_counter()`` when the training thread turned to it.
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
        num_new = num_skipped - self._num_told
        self._take("saving", step, ago_secs, {**values, "num_skipped": num_new})
        self._num_told = num_skipped

    @_harmless
    def durable(self, cost: SaveCost, path: epath.Path) -> None:
        """A step was committed; what it takes on storage is measured on the thread of events."""
        costs = {"blocking_secs": cost.blocking_secs, "durable_secs": cost.durable_secs}
        self._take("durable", cost.step, 0.0, costs, path)

    @_harmless
    def steps_gone(self, name: str, steps: Sequence[int]) -> None:
        """Steps were deleted, or set aside."""
        if steps:
            self.emit(name, steps=list(steps))

    @_harmless
    def emit(self, name: str, step: int | None = None, **values: Any) -> None:
        """Something happened, just now."""
        self._take(name, step, 0.0, values)

    def _take(
        self,
        name: str,
        step: int | None,
        ago_secs: float,
        values: dict[str, Any],
        committed: epath.Path | None = None,
    ) -> None:
        event = Event(name, time.time() - ago_secs, step, bounded(values))
        with self._lock:
            self._tally.take(event)
            if self._is_closed or self._worker.queue.qsize() >= _MAX_WAITING:
                return
            self._worker.queue.put((event, committed))
            self._start()

    @_harmless
    def open(self, steps: Sequence[int]) -> None:
        """The directory may be written to from now on: this program has its lease.

        Args:
          steps: those that are there; what earlier programs were killed over is not recorded.
        """
        if jax.process_index() != 0:
            return  # one process writes for all; each tells its own hook
        with self._lock:
            is_new, self._is_open = not self._is_open, True
            self._has_thread = True
        self._worker.may_write = True
        if is_new:
            self.emit(
                "started",
                host=platform.node(),
                pid=os.getpid(),
                version=installed_versions()["torchax_ckpt"],
                keeps=self._keeps,
                steps=list(steps) if len(steps) <= MAX_STEPS else None,
            )

    def lost(self) -> None:
        """The directory is another program's by now."""
        self._worker.may_write = False

    def close(self) -> None:
        """Waits until everything is told and written, for some seconds at most."""
        if os.getpid() != self._worker.pid:
            return  # a process forked from the one that writes
        if self._is_open and not self._is_closed:
            self.emit("closed", self._worker.step, num_skipped=self._worker.num_skipped)
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self._worker.queue.put(_END)
        if thread is None or thread is threading.current_thread():  # a hook may close, too
            return
        thread.join(_CLOSING_SECS)
        if thread.is_alive():
            logger.warning(
                "%s: the last events are still being told or written after %.0f s; leaving them",
                self._worker.directory.path,
                _CLOSING_SECS,
            )

    def stats(self) -> Stats:
        """The numbers so far."""
        with self._lock:
            return self._tally.stats(self._worker.num_skipped)

    def _start(self) -> None:
        if self._thread is not None or not self._has_thread or self._is_closed:
            return
        self._thread = threading.Thread(target=self._worker.run, name="events", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter is ending
            self._thread, self._has_thread = None, False
            logger.warning("events are neither told nor written: %s", error)


class _Worker:
    """What the thread of a ``Telemetry`` does."""

    def __init__(
        self,
        directory: RunDirectory,
        on_event: Callable[[Event], None] | None,
        tally: Tally,
        lock: contextlib.AbstractContextManager[Any],
    ) -> None:
        self.directory = directory
        self._tally, self._lock = tally, lock
        self.pid = os.getpid()
        # Its put may be called by the garbage collector in the middle of another put.
        self.queue: queue.SimpleQueue[tuple[Event, epath.Path | None] | None] = queue.SimpleQueue()
        self.may_write = False
        self.step: int | None = None
        self.num_skipped = 0
        self._on_event = on_event
        self._is_hook_broken = self._is_journal_broken = self._is_note_broken = False
        self._journal = Journal(directory.path, secrets.token_hex(4))
        self._lines: collections.deque[bytes] = collections.deque(maxlen=_MAX_WAITING)
        self._due_secs = 0.0
        self._said_step: int | None = None
        self._said_secs = 0.0

    def run(self) -> None:
        """Tells and writes events until the end comes."""
        is_ending = False
        while not is_ending:
            is_ending = self._take()
            self._say_reached()
            if self._lines and self.may_write and (is_ending or time.monotonic() >= self._due_secs):
                self._write()

    def _take(self) -> bool:
        """Waits for events, or until there is something to do; whether the end has come."""
        waits = self._lines and self.may_write
        secs = max(0.0, self._due_secs - time.monotonic()) if waits else _REACHED_SECS
        try:
            taken = self.queue.get(timeout=secs)
            while taken is not _END:
                event, committed = taken
                if committed is not None and self.may_write:  # one process measures for all
                    event = self._measured(event, committed)
                self._tell(event)
                self._note(event)
                if event.step is not None:
                    self._said_step, self._said_secs = event.step, time.monotonic()
                taken = self.queue.get_nowait()
        except queue.Empty:
            return False
        return True

    def _measured(self, event: Event, path: epath.Path) -> Event:
        """A durable step with what it takes on storage, if it is still there."""
        num_bytes = 0
        with contextlib.suppress(Exception):  # each client of a bucket has its errors
            settled = self.directory.path / str(event.step)  # where an incoming one is moved to
            num_bytes = containment.stored_bytes(path) or containment.stored_bytes(settled)
        if not num_bytes:
            return event
        with self._lock:
            self._tally.measured("durable", "num_bytes", num_bytes)
        return dataclasses.replace(event, values={**event.values, "num_bytes": num_bytes})

    def _tell(self, event: Event) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(event)
            self._is_hook_broken = False
        except BaseException:  # a hook may end the program elsewhere, but not this thread
            # Once until it works again: it may be called several times a second.
            level = logging.DEBUG if self._is_hook_broken else logging.ERROR
            logger.log(level, "on_event failed with %s; saving goes on", event, exc_info=True)
            self._is_hook_broken = True

    def _say_reached(self) -> None:
        """Where the training is, if no event has said so for a while."""
        is_due = time.monotonic() - self._said_secs >= _REACHED_SECS
        if self.may_write and is_due and self.step != self._said_step:
            event = Event("reached", time.time(), self.step, {"num_skipped": self.num_skipped})
            self._said_step, self._said_secs = self.step, time.monotonic()
            self._tell(event)
            self._note(event)

    def _note(self, event: Event) -> None:
        try:
            self._lines.append(event.to_line())
        except Exception as error:  # of a hook, which may have changed it
            level = logging.DEBUG if self._is_note_broken else logging.WARNING
            logger.log(level, "%s cannot be written, and is left out: %s", event, error)
            self._is_note_broken = True

    def _write(self) -> None:
        lines = list(self._lines)
        try:
            self._journal.append(lines)
        except Exception as error:  # each client of a bucket has errors of its own
            level = logging.DEBUG if self._is_journal_broken else logging.WARNING
            text = "%s: events cannot be written for now, which harms nothing else: %s"
            logger.log(level, text, self.directory.path, error)
            self._is_journal_broken = True
            self._due_secs = time.monotonic() + _RETRY_SECS
        else:
            self._lines.clear()
            self._is_journal_broken = False
            self._due_secs = time.monotonic() + self._journal.patience_secs
