"""Ends a checkpointer's background work: on ``close``, on garbage collection, or at program exit.

If a checkpointer is garbage-collected without ``close``, a separate thread closes it. A new
checkpointer of the same process and directory first closes the collected one itself.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - see the end of this module
import contextlib
import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Literal

from torchax_ckpt.errors import ClosedError, SaveTimeoutError
from torchax_ckpt.processes.decision_windows import DecisionWindows
from torchax_ckpt.runtime import background
from torchax_ckpt.runtime.call_guard import Calls
from torchax_ckpt.saving.failures import unmended
from torchax_ckpt.saving.saver import Saver
from torchax_ckpt.saving.training_loop.deadline import Deadline
from torchax_ckpt.telemetry.recorder import Hook

logger = logging.getLogger(__name__)


class Closing:
    """Ends the background work of one checkpointer: saves, leases, threads, SIGTERM handling.

    Refers to parts of the checkpointer, never to the checkpointer itself: the threads and exit
    hooks that use this object would prevent its garbage collection. The first of ``savers`` is the
    durable tier's. ``last`` is called after everything has ended, maybe repeatedly.
    """

    def __init__(
        self,
        savers: Sequence[Saver],
        windows: Sequence[DecisionWindows | Deadline],
        calls: Calls,
        last: Callable[[], None],
    ) -> None:
        self._savers = savers
        self.calls = calls
        self._windows = windows
        self._last = last
        self._pid = os.getpid()
        self._lock = threading.RLock()  # reentrant: the collector may call drop() at any point
        self._task: background.Task | None = None
        self._state: Literal["open", "closing", "dropped", "ended"] = "open"
        with _lock:
            _unfinished.add(self)

    @property
    def is_asked(self) -> bool:
        """Whether the checkpointer was closed or garbage-collected."""
        return self._state != "open"

    def close(self) -> None:
        """Ends the background work; after a SaveTimeoutError only the save in flight goes on."""
        if self._state == "open":
            self._state = "closing"
        try:
            background.run_whole("closing", self._close_parts)
        except BaseException:  # also an interrupt
            self._finish_later()
            raise
        self._end()

    def _close_parts(self) -> None:
        for each in self._windows:
            each.close()
        with contextlib.ExitStack() as closing:  # closes every saver, even if one raises
            for saver in self._savers:
                closing.callback(saver.close)

    def drop(self, hook: Hook | None) -> None:
        """Starts a thread that finishes any work; the collector calls this at any point."""
        if self._state == "ended" or self._pid != os.getpid():
            return
        if hook is not None:
            hook.outlive()
        self._state = "dropped"
        if self.has_work:
            _dropped.append(self)  # the collector has cleared the weak reference in _unfinished
            self._finish_later()

    def concerns(self, saver: Saver) -> bool:
        """Returns whether this checkpointer has not ended and writes where ``saver`` does."""
        begun = {os.path.realpath(str(s.path)) for s in self._savers if s.has_begun}
        is_own = any(other is saver for other in self._savers)
        return not (self._state == "ended" or is_own) and os.path.realpath(str(saver.path)) in begun

    @property
    def has_work(self) -> bool:
        """Whether this process may have to end saves and threads, or to release leases."""
        parts: list[Saver | DecisionWindows | Deadline] = [*self._savers, *self._windows]
        return self._pid == os.getpid() and any(part.has_begun for part in parts)

    def running(self) -> list[str]:
        """Returns a text for each save and copy in flight that names its step and directory."""
        saves = [f"step {s.saving_step} of {s.path}" for s in self._savers if s.is_saving]
        return [*saves, *filter(None, (s.tier.mirroring.in_flight for s in self._savers))]

    def finish_at_exit(self) -> None:
        """Closes all savers at program exit, but for saves beyond ``save_timeout_secs``."""
        was_closed = self._state in ("closing", "ended")
        how = "before close() could finish" if was_closed else "without close()"
        durable = self._savers[0]
        for saver in self._savers:
            step = saver.saving_step
            if step is not None:
                logger.warning("the program is ending %s: finishing the save of step %d", how, step)
            try:
                saver.close()
            except SaveTimeoutError as error:
                logger.error("giving up: %s", error)
                if saver is durable:
                    unmended[saver.path] = error
                continue
            if step is not None and saver.tier.failures.newest is None:
                logger.info("step %d is saved", step)
        if not was_closed and durable.tier.failures.newest is not None:
            unmended[durable.path] = durable.tier.failures.newest

    def end_decisions(self) -> None:
        """Ends the decisions on later saves; before, an exit handler of the program may save."""
        for each in self._windows if self._pid == os.getpid() else ():
            each.close()

    def _finish_later(self) -> None:
        with self._lock:
            if self._task is None or self._task.is_cancelled:
                self._task = background.Task("closing", self._finish)
                with contextlib.suppress(RuntimeError):  # close_others() or the exit finishes
                    self._task.start()

    def _finish(self) -> None:
        for each in self._windows:
            each.close()
        for saver in self._savers:
            saver.join()
            saver.close()
        self._end()

    def _end(self) -> None:
        self._last()
        with self._lock:
            before, self._state = self._state, "ended"
        with contextlib.suppress(ValueError):
            _dropped.remove(self)
        if before == "dropped":
            text = "%s: closed a garbage-collected checkpointer; call close() to get its errors"
            for saver in self._savers:
                if (failure := saver.tier.failures.newest) is not None:
                    logger.error(f"{text}. Its newest save failed: %s", saver.path, failure)
                elif saver.has_begun:
                    logger.info(text, saver.path)


# ``_unfinished`` is for checkpointers that are not garbage-collected, ``_dropped`` for
# garbage-collected ones whose background work has not ended.
_unfinished: weakref.WeakSet[Closing] = weakref.WeakSet()
_dropped: list[Closing] = []
_lock = threading.RLock()  # reentrant: the collector may call Closing.drop() at any point


def close_others(saver: Saver) -> None:
    """Closes collected or half-closed checkpointers of this process that may still write there."""
    with _lock:
        others = [c for c in {*_unfinished, *_dropped} if c.concerns(saver)]
    if not all(other.is_asked for other in others):
        gc.collect()
    for other in others:
        if other.is_asked:
            logger.warning(
                "%s: taking over from a checkpointer of this program that is not closed",
                saver.path,
            )
            other.close()


_has_finished = background.Flag()  # set once the program's end allows no more saves


def require_program() -> None:
    """Raises ClosedError, and fails the exit code, if it is too late to begin anything."""
    if _has_finished.is_set:
        background.fail_exit()
        raise ClosedError(
            "the program is ending, and torchax_ckpt has finished its work: save before the last "
            "line, or in an exit handler that was registered after the import of torchax_ckpt"
        )


def _finish_main_thread() -> None:
    background.ending.set()
    closings = {*_unfinished, *_dropped}
    _finish([c for c in closings if c.is_asked or not c.calls.outlive_main])


def _finish_program() -> None:
    _has_finished.set()  # first, so that no thread that still runs begins another save
    closings = [*_unfinished, *_dropped]
    for closing in closings:
        closing.end_decisions()
    _finish(closings)
    for path, failure in unmended.items():
        logger.error("%s: the program ends, and its newest save failed: %s", path, failure)
        background.fail_exit()


def _finish(closings: Sequence[Closing]) -> None:
    unfinished = [closing for closing in closings if closing.has_work]
    if not unfinished:
        return

    def finish() -> None:
        for closing in unfinished:
            closing.finish_at_exit()

    def lost() -> str:
        steps = [step for closing in unfinished for step in closing.running()]
        return ", ".join(steps) or "nothing: every save has ended"

    task = background.Task("exit", finish)
    try:
        task.start()
    except RuntimeError:  # no thread can be started
        finish()
    background.finish_at_exit(task, lost)


# At the end, Python calls the hooks registered with ``threading``, newest first: this one, then
# that of concurrent.futures, imported above, which ends executors, such as gcsfs's. Next, Python
# waits for threads. Then it calls the handlers registered with ``atexit``, newest first: those of
# users, this one, then that of JAX, imported before, which ends its devices.
threading._register_atexit(_finish_main_thread)  # type: ignore[attr-defined]
atexit.register(_finish_program)
