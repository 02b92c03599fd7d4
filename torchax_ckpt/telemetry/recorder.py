"""Takes events from the threads of a checkpointer, and handles them on a thread of its own.

``Telemetry.emit`` takes microseconds; the thread calls the user's function and writes the journal,
so neither a slow function nor stalled storage delays training or a save.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import platform
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
from etils import epath

from torchax_ckpt.errors import ArgumentError
from torchax_ckpt.layout.manifest import installed_versions
from torchax_ckpt.runtime.background import Task
from torchax_ckpt.runtime.user_messages import counted, fields
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.shared_files import Usage
from torchax_ckpt.telemetry.events import Event, SaveCost, bounded
from torchax_ckpt.telemetry.journal import Journal
from torchax_ckpt.telemetry.stats import Quantiles, Stats

logger = logging.getLogger(__name__)

# The most events that wait for the hook, and the most lines that wait for the journal. Beyond that,
# the newest events and the oldest lines are dropped.
_MAX_WAITING = 10_000
# Quantiles are computed from the latest values only.
_MAX_VALUES = 1000
_REACHED_SECS = 60.0
_RETRY_SECS = 30.0
_CLOSING_SECS = 10.0
_PATIENCE_SECS = 1.0
_END = None

# An event, the steps of the run after it if it changes them, and the bytes that a save reused.
_Queued: TypeAlias = tuple[Event, Sequence[CommittedStep] | None, int]


@contextlib.contextmanager
def _errors_logged() -> Iterator[None]:
    """Logs errors, so that they never reach the training or a save."""
    try:
        yield
    except Exception:
        text = "an event is dropped after an error; training and saves go on"
        logger.warning(text, exc_info=True)


def _newest(steps: Sequence[CommittedStep] | None) -> dict[str, Any]:
    """Returns the values of an event that concern the newest of the durable steps."""
    return {"newest_step": steps[-1].step, "newest_age_secs": steps[-1].age_secs} if steps else {}


class Tally:
    """Keeps the numbers of events for ``Stats``; its callers hold one lock."""

    def __init__(self) -> None:
        self._totals: collections.Counter[str] = collections.Counter()
        self._values: dict[str, collections.deque[float]] = {}

    def take(self, event: Event, *, counts: bool = True) -> None:
        """Takes an event's numbers; without ``counts``, those measured after it was counted."""
        for metric in Stats.metrics().values():
            if (number := event.number(metric)) is None:
                continue
            if metric.kind in ("count", "sum"):
                self._totals[metric.name] += int(number) if counts else 0
            else:
                latest = collections.deque[float](maxlen=_MAX_VALUES)
                self._values.setdefault(metric.name, latest).append(number)

    def stats(self, num_skipped: int) -> Stats:
        """Returns the statistics of the events so far; ``num_skipped`` counts also later calls."""
        attributes: dict[str, Any] = {name: values[-1] for name, values in self._values.items()}
        for name, metric in Stats.metrics().items():
            if metric.kind in ("count", "sum"):
                attributes[name] = self._totals[name]
            elif metric.kind == "quantiles":
                attributes[name] = Quantiles.of(self._values.get(name, ()))
            elif metric.kind == "age" and name in attributes:
                attributes[name] = max(0.0, time.time() - attributes[name])
        return Stats(**{**dict.fromkeys(Stats.metrics()), **attributes, "num_skipped": num_skipped})


class Telemetry:
    """Takes and counts the events of one checkpointer.

    The directory is written to only between ``open`` and ``close``; ``on_event`` is called in
    order, on one thread. ``keeps`` are the rules of the preservation policy as data, for reports;
    ``abandoned`` lists the steps of abandoned branches.
    """

    def __init__(
        self,
        directory: epath.Path,
        on_event: Callable[[Event], None] | None = None,
        keeps: Sequence[dict[str, Any]] = (),
        abandoned: Callable[[], list[CommittedStep]] = list,
    ) -> None:
        self._directory, self._on_event, self._keeps = directory, on_event, list(keeps)
        self._abandoned = abandoned
        self._pid = os.getpid()
        self._tally = Tally()
        self._lock = threading.RLock()  # a signal handler may call stats in the middle of emit
        # A SimpleQueue, because the garbage collector may call put in the middle of another put.
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._task: Task | None = None
        self._has_thread = on_event is not None
        self._is_heard = self._has_thread or jax.process_index() == 0  # else no thread takes events
        self._is_open = self._is_closed = self._may_write = False
        self._step: int | None = None
        self._saving: tuple[float, int] | None = None  # when the last save began, and its step
        self._num_skipped = self._num_reported = 0  # declined saves, and those in earlier events
        # Used by the thread of events only.
        self._journal = Journal(directory, secrets.token_hex(4))
        self._lines: collections.deque[bytes] = collections.deque(maxlen=_MAX_WAITING)
        self._usage = Usage()
        self._failing: set[str] = set()
        self._due_secs = self._reported_secs = 0.0
        self._reported_step: int | None = None

    @property
    def has_thread(self) -> bool:
        """True if a thread that delivers or writes events was started."""
        return self._task is not None

    def skipped(self, step: int) -> None:
        """Counts a step that training reached and did not save; later events report the count."""
        self._num_skipped += 1
        self._step = step

    def saving(self, step: int, began: float) -> None:
        """Records that a save began. The training thread must not call it: it may have to wait."""
        num_skipped = self._num_skipped
        values: dict[str, Any] = {"num_skipped": num_skipped - self._num_reported}
        if self._saving is not None:
            last_began, last_step = self._saving
            values["interval_secs"] = began - last_began
            values["interval_steps"] = max(0, step - last_step)
        self._saving, self._num_reported = (began, step), num_skipped
        self._step = max(step, self._step or 0)
        self._take("saving", step, values, ago_secs=time.perf_counter() - began)

    def durable(
        self, cost: SaveCost, reused_bytes: int, metrics: Any, steps: Sequence[CommittedStep]
    ) -> None:
        """Records that a step was committed; ``reused_bytes`` of it are in reused files."""
        values: dict[str, Any] = {"metrics": metrics or None, "durable_secs": cost.durable_secs}
        values["blocking_secs"] = cost.blocking_secs
        self._take("durable", cost.step, values, steps, reused_bytes)

    def steps_gone(self, name: str, gone: Sequence[int], steps: Sequence[CommittedStep]) -> None:
        """Records ``deleted`` or ``set_aside``, unless no steps are gone; ``steps`` remain."""
        if gone:
            self._take(name, None, {"steps": list(gone)}, steps)

    def restored(self, committed: CommittedStep, tier: str, **values: Any) -> None:
        """Records that the run continues from a step of the tier of this name."""
        is_newest = tier == "durable" and committed.step >= (self.stats().newest_step or 0)
        newest = _newest([committed]) if is_newest else {}
        self._take("restored", committed.step, {**values, "tier": tier, **newest})

    def emit(self, name: str, step: int | None = None, **values: Any) -> None:
        """Records an event that happened just now."""
        self._take(name, step, values)

    @_errors_logged()
    def _take(
        self,
        name: str,
        step: int | None,
        values: dict[str, Any],
        steps: Sequence[CommittedStep] | None = None,
        reused_bytes: int = 0,
        *,
        ago_secs: float = 0.0,
    ) -> None:
        event = Event(name, time.time() - ago_secs, step, bounded({**values, **_newest(steps)}))
        with self._lock:
            self._tally.take(event)
            if self._is_heard and not self._is_closed and self._queue.qsize() < _MAX_WAITING:
                self._queue.put((event, steps, reused_bytes))
                self._start()

    @_errors_logged()
    def open(self, steps: Sequence[CommittedStep]) -> None:
        """Lets process 0 write events, because the run, with these steps, now holds the lease."""
        if self._is_closed:  # an exit handler goes on using the checkpointer
            self._is_closed, self._task = False, None
        if jax.process_index() != 0:
            return  # only process 0 writes; each process calls its own hook
        with self._lock:
            is_new, self._is_open = not self._is_open, True
            self._has_thread = True
        self._may_write = True
        if is_new:
            values = {
                "host": platform.node(),
                "pid": os.getpid(),
                "version": installed_versions()["torchax_ckpt"],
                "keeps": self._keeps,
            }
            self._take("started", None, values, steps)

    def lost(self) -> None:
        """Stops writing events, because another program has the lease; the hook still gets them."""
        self._may_write = False

    def close(self) -> None:
        """Waits until all events are delivered and written, but for at most 10 seconds."""
        if os.getpid() != self._pid:
            return  # this process was forked from the one that writes
        with self._lock:  # two threads may close at the same time
            if self._is_open and not self._is_closed:
                self.emit("closed", self._step, num_skipped=self._num_skipped)
            self._is_closed = True
            task = self._task
        self._queue.put(_END)
        if task is None or task.thread_id == threading.get_ident():  # a hook may call close, too
            return
        if not task.ended.wait(_CLOSING_SECS):
            logger.warning(
                "%s: the last events are still being delivered or written after %.0f s; "
                "the checkpointer closes without waiting for them",
                self._directory,
                _CLOSING_SECS,
            )

    def stats(self) -> Stats:
        """Returns the statistics of the events so far."""
        with self._lock:
            return self._tally.stats(self._num_skipped)

    def log_end(self) -> None:
        """Logs that the program has closed the run, and what its saves came to."""
        stats = self.stats()
        text = "closed %s: newest durable step %s; saves: %d durable, %d failed"
        values = self._directory, stats.newest_step, stats.num_durable, stats.num_failed
        medians = {name: getattr(value, "p50", value) for name, value in vars(stats).items()}
        extra = fields(step=stats.newest_step, path=self._directory, **medians)
        logger.info(text, *values, extra=extra)

    def _start(self) -> None:
        if self._task is not None or not self._has_thread or self._is_closed:
            return
        self._task = Task("events", self._run)
        try:
            self._task.start()
        except RuntimeError as error:  # no more threads, or the interpreter is shutting down
            self._task, self._has_thread = None, False
            logger.warning("events are neither delivered nor written; no thread starts: %s", error)

    # --- on the thread of events ---

    def _run(self) -> None:
        is_ending = False
        while not is_ending:
            is_ending = self._handle_waiting()
            self._report_reached()
            is_due = is_ending or time.monotonic() >= self._due_secs
            if self._lines and self._may_write and is_due:
                self._write()

    def _handle_waiting(self) -> bool:
        """Handles events; waits for them, or until the journal is due; returns True at the end."""
        has_lines = self._lines and self._may_write
        secs = max(0.0, self._due_secs - time.monotonic()) if has_lines else _REACHED_SECS
        try:
            queued = self._queue.get(timeout=secs)
            while queued is not _END:
                event, steps, reused_bytes = queued
                if steps is not None and self._may_write:  # only process 0 measures
                    event = self._measured(event, steps, reused_bytes)
                self._handle(event)
                queued = self._queue.get_nowait()
        except queue.Empty:
            return False
        return True

    def _measured(self, event: Event, steps: Sequence[CommittedStep], reused_bytes: int) -> Event:
        """Returns an event with the bytes of its step and of all steps, if storage answers."""
        aside: dict[str, int] = {}
        try:
            self._usage.update(steps)
            if event.name in ("started", "set_aside"):
                abandoned = self._abandoned()
                num_bytes = Usage(abandoned).freed_bytes(abandoned)
                aside = {"num_abandoned": len(abandoned), "abandoned_bytes": num_bytes}
        except Exception as error:  # bucket clients raise errors of their own
            logger.debug("%s: the bytes of steps are not known: %s", self._directory, error)
            return event
        if event.name == "set_aside":
            logger.info(
                "%s: steps %s were set aside; %s there hold %.1f MB, and nothing deletes them but "
                "`torchax-ckpt prune --abandoned --delete`",
                self._directory,
                event.values["steps"],
                counted(len(abandoned), "abandoned step"),
                num_bytes / 1e6,
                extra=fields(path=self._directory, steps=event.values["steps"]),
            )
        sizes = {"total_bytes": self._usage.total_bytes, **aside}
        new = next((s for s in reversed(steps) if s.step == event.step), None)
        if new is not None and (num_bytes := self._usage.num_bytes(new)):  # 0: deleted meanwhile
            shared_bytes = min(num_bytes, reused_bytes)
            sizes |= {"num_bytes": num_bytes, "new_bytes": num_bytes - shared_bytes}
            sizes |= {"shared_bytes": shared_bytes}
        with self._lock, _errors_logged():
            self._tally.take(dataclasses.replace(event, values=sizes), counts=False)
        return dataclasses.replace(event, values={**event.values, **sizes})

    def _handle(self, event: Event) -> None:
        if event.step is not None:
            self._reported_step, self._reported_secs = event.step, time.monotonic()
        if self._on_event is not None:
            try:
                self._on_event(event)
                self._failing.discard("hook")
            except BaseException:  # a hook may raise SystemExit, which must not end this thread
                text = "on_event failed with %s; saving goes on"
                self._log_once("hook", logging.ERROR, text, event, exc_info=True)
        try:
            self._lines.append(event.to_line())
        except Exception as error:  # the hook may have changed the event
            text = "%s cannot be written as JSON and is dropped: %s"
            self._log_once("line", logging.WARNING, text, event, error)

    def _report_reached(self) -> None:
        """Records the latest step of training if it is new, and no event had one for a minute."""
        is_due = time.monotonic() - self._reported_secs >= _REACHED_SECS
        if self._may_write and is_due and self._step != self._reported_step:
            values = {"num_skipped": self._num_skipped}
            self._handle(Event("reached", time.time(), self._step, values))

    def _write(self) -> None:
        try:
            self._journal.append(list(self._lines))
        except Exception as error:  # bucket clients raise errors of their own
            text = "%s: events cannot be written for now, but saves go on: %s"
            self._log_once("journal", logging.WARNING, text, self._directory, error)
            self._due_secs = time.monotonic() + _RETRY_SECS
        else:
            self._lines.clear()
            self._failing.discard("journal")
            self._due_secs = time.monotonic() + self._journal.patience_secs

    def _log_once(self, what: str, level: int, text: str, *args: Any, **settings: Any) -> None:
        """Logs a failure; at DEBUG while ``what`` keeps failing, perhaps every second."""
        logger.log(logging.DEBUG if what in self._failing else level, text, *args, **settings)
        self._failing.add(what)


class Hook:
    """The user's ``on_event`` function, to which only the checkpointer holds a strong reference.

    It may be a method of an object that refers to the checkpointer; a thread with a strong
    reference would keep the checkpointer alive.
    """

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        if not callable(on_event):
            raise ArgumentError(
                f"on_event: expected a function of one Event, found {on_event!r:.100}"
            )
        self.on_event = on_event
        self.call = _WeakCall(self)

    def outlive(self) -> None:
        """Makes ``call`` keep this hook, so that events that still wait reach the user."""
        self.call.strong_hook = self


class _WeakCall:
    def __init__(self, hook: Hook) -> None:
        self._hook = weakref.ref(hook)
        self.strong_hook: Hook | None = None

    def __call__(self, event: Event) -> None:
        # The garbage collector clears weak references shortly before it calls the finalizer, which
        # sets ``strong_hook``. The loop waits for that.
        deadline = time.monotonic() + _PATIENCE_SECS
        while (hook := self.strong_hook or self._hook()) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        if hook is not None:
            hook.on_event(event)
