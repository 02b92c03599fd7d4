"""The end of a checkpointer: by ``close``, after a late save, when it is unreachable, at exit.

A checkpointer that nobody can reach any more ends as by ``close``, on a thread. A new checkpointer
of the same process and directory waits for that thread's work at its first save, and does it
itself if it comes first.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - see the end of this module
import contextlib
import gc
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torchax_ckpt.errors import SaveError, SaveTimeoutError
from torchax_ckpt.telemetry.hook import Hook

logger = logging.getLogger(__name__)


class _Saver(Protocol):
    """What ends of one tier."""

    path: Any
    newest_failure: SaveError | None

    @property
    def has_begun(self) -> bool: ...
    @property
    def saving_step(self) -> int | None: ...
    def close(self) -> None: ...
    def join(self) -> None: ...


class Closing:
    """Ends the background work of one checkpointer: saves, leases, threads, notices of SIGTERM.

    Refers to parts of the checkpointer, never to the checkpointer itself: the threads and hooks
    that end these parts would keep it alive.

    Attributes:
      is_asked: whether ``close`` was called, or the checkpointer is unreachable.

    Args:
      savers: of the tiers.
      first: called before the saves in flight are waited for; may be called more than once.
      last: called after everything has ended; may be called more than once.
    """

    def __init__(
        self,
        savers: Sequence[_Saver],
        first: Sequence[Callable[[], None]],
        last: Callable[[], None],
    ) -> None:
        self._savers = savers
        self._first = first
        self._last = last
        self._pid = os.getpid()
        self._lock = threading.RLock()  # drop() may run inside anything that this thread does
        self._thread: threading.Thread | None = None
        self._is_dropped = self._has_ended = False
        self.is_asked = False
        _unfinished.add(self)

    def close(self) -> None:
        """Ends everything.

        Raises:
          SaveTimeoutError: a save is still in flight. Everything else is ended; the rest follows
            as soon as that save has ended, on a thread or in another call.
        """
        self.is_asked = True
        try:
            for stop in self._first:
                stop()
            with contextlib.ExitStack() as closing:  # each, whatever another raises
                for saver in self._savers:
                    closing.callback(saver.close)
        except BaseException:  # also when interrupted
            self._finish_later()
            raise
        self._end()

    def drop(self, hook: Hook | None) -> None:
        """Ends everything on a thread, as the checkpointer is unreachable.

        May be called by the garbage collector, at any place and on any thread.

        Args:
          hook: the user's; still told what happens from now on.
        """
        if hook is not None:
            hook.outlive()
        if self._has_ended or self._pid != os.getpid() or sys.is_finalizing():
            return
        self._is_dropped = self.is_asked = True
        if any(saver.has_begun for saver in self._savers):
            _dropped.append(self)  # the collector has cleared the weak reference in _unfinished
            self._finish_later()

    def concerns(self, saver: _Saver) -> bool:
        """Whether this is another checkpointer that may write to the directory of a saver."""
        return (
            not self._has_ended
            and not any(mine is saver for mine in self._savers)
            and any(str(s.path) == str(saver.path) and s.has_begun for s in self._savers)
        )

    def finish_at_exit(self) -> None:
        """Finishes the saves in flight of a program that is ending, and ends everything."""
        was_closed = self.is_asked and not self._is_dropped
        how = "before close() could finish" if was_closed else "without close()"
        for saver in self._savers:
            step = saver.saving_step
            if step is not None:
                logger.warning("the program is ending %s: finishing the save of step %d", how, step)
            try:
                saver.close()
            except SaveTimeoutError as error:
                logger.error("giving up: %s", error)
                continue
            if step is not None and saver.newest_failure is None:
                logger.warning("step %d is saved", step)

    def _finish_later(self) -> None:
        with self._lock:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._finish, name="closing", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads: the next checkpointer does it, or the exit
                self._thread = None

    def _finish(self) -> None:
        for stop in self._first:
            stop()
        for saver in self._savers:
            saver.join()
            saver.close()
        self._end()

    def _end(self) -> None:
        self._last()
        with self._lock:
            is_new, self._has_ended = not self._has_ended, True
        with contextlib.suppress(ValueError):
            _dropped.remove(self)
        if is_new and self._is_dropped:
            for saver in self._savers:
                self._tell(saver)

    def _tell(self, saver: _Saver) -> None:
        text = "%s: a checkpointer that is unreachable was closed; close it to hear of failures"
        if saver.newest_failure is not None:
            logger.error(f"{text}. Its newest save failed: %s", saver.path, saver.newest_failure)
        elif saver.has_begun:
            logger.info(text, saver.path)


# Checkpointers that have not been collected, and unreachable ones that have not ended.
_unfinished: weakref.WeakSet[Closing] = weakref.WeakSet()
_dropped: list[Closing] = []


def take_over(saver: _Saver) -> None:
    """Ends other checkpointers of this process and directory, if nobody will use them again.

    Args:
      saver: of the checkpointer that is about to write.

    Raises:
      SaveTimeoutError: a save of such a checkpointer has taken too long, and goes on.
    """
    others = [c for c in {*_unfinished, *_dropped} if c.concerns(saver)]
    if not all(other.is_asked for other in others):
        gc.collect()
    for other in others:
        if other.is_asked:
            logger.warning(
                "%s: taking over from a checkpointer of this program that nobody uses any more",
                saver.path,
            )
            other.close()


def _finish_at_exit() -> None:
    for closing in [*_unfinished, *_dropped]:
        closing.finish_at_exit()


# The interpreter refuses new threads and executor work once its shutdown has begun, which a save
# needs; atexit hooks run too late. Hooks registered here run before that, the newest first, so
# this one precedes the one of concurrent.futures, which is registered by importing it above.
threading._register_atexit(_finish_at_exit)  # type: ignore[attr-defined]
