"""Owns preemption: whether this run has been told to end, by SIGTERM or by JAX's sync point.

Without ``jax.distributed``, a thread hears SIGTERM through the file descriptor that Python's own
C handler writes to. A Python handler alone would run only once the main thread is back in Python,
which a transfer keeps it from for seconds.

With ``jax.distributed``, JAX has a handler of its own and finds a step on which all processes
agree. That handler displaces earlier ones without Python noticing, and is itself displaced by
later ones, which would end its notices; so it is never touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
import types
import weakref
from typing import Any, Literal, NoReturn

import jax
from jax.experimental import multihost_utils

logger = logging.getLogger(__name__)

# What a shell reports of a process that SIGTERM ended. Unlike such an end it is a failure to every
# scheduler: systemd, for one, takes death by SIGTERM for a clean exit.
EXIT_CODE = 128 + signal.SIGTERM
# Signals this close are one notice: GNU timeout sends its child two, one right after the other.
_ONE_NOTICE_SECS = 0.1
_WAKE = b"\0"  # in the pipe, between the numbers of signals


class Preemption:
    """Whether the run of one checkpointer was told to end; once it was, that stays.

    Args:
      grace_secs: from a SIGTERM to the end of the process; None leaves SIGTERM alone.
    """

    def __init__(self, grace_secs: float | None) -> None:
        self.grace_secs = grace_secs
        self._reached = False
        self._decided: int | None = None

    def listen(self) -> None:
        """From now on SIGTERM is a notice to this run. May be called again, before every step.

        Needs the main thread, as Python changes handlers there only; elsewhere it says so once.
        """
        if self.grace_secs is not None and not _jax_has_sigterm():
            _watch.add(self, self.grace_secs)

    def reached(self, step: int | None = None) -> bool:
        """Whether the run should save and end, asked after completing ``step``.

        JAX answers True at one step only, the one on which all processes agree, so every process
        must ask at every step. Without a step nobody is asked: what was answered so far.
        """
        if step is not None and step != self._decided and not self._reached:
            if _jax_has_sigterm():
                self._reached = _at_sync_point(step)
            else:
                self._reached = self.grace_secs is not None and _watch.noticed_at is not None
        return self._reached

    def decide(self, step: int) -> bool:
        """What ``reached`` says, and goes on to say of this step: who is told to end has saved."""
        answer = self.reached(step)
        self._decided = step
        return answer

    def close(self) -> None:
        """Gives SIGTERM back to who had it before, if nobody else listens and none has come."""
        _watch.remove(self)


def _jax_has_sigterm() -> bool:
    return jax.distributed.is_initialized()


def _at_sync_point(step: int) -> bool:
    try:
        return multihost_utils.reached_preemption_sync_point(step)
    except RuntimeError:
        _watch.say_once("JAX's preemption service is turned off: SIGTERM is not noticed")
        return False


class _Watch:
    """Hears SIGTERM for all checkpointers of this process.

    Uses no locks: what it does must also work in a signal handler and in a forked process.

    Attributes:
      noticed_at: ``time.monotonic()`` of the first SIGTERM, or None.
    """

    def __init__(self) -> None:
        self.noticed_at: float | None = None
        self._listeners: weakref.WeakSet[Preemption] = weakref.WeakSet()
        self._grace_secs = 0.0
        self._first_heard: dict[str, float] = {}
        self._said: set[str] = set()
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._previous: Any = signal.SIG_DFL
        # A wakeup descriptor that was there before ours: its number, and our duplicate, which
        # stays the same file even if its owner closes it and the number is given away again.
        self._chained: tuple[int, int] | None = None
        self._forking = threading.local()

    # --- coming and going, on the main thread ---

    def add(self, listener: Preemption, grace_secs: float) -> None:
        longest = max(self._grace_secs, grace_secs) if self._listeners else grace_secs
        if self._pipe is None and not self._install():
            return
        self._grace_secs = longest
        self._listeners.add(listener)
        if threading.current_thread() is threading.main_thread():
            self._take_wakeup_fd()

    def remove(self, listener: Preemption) -> None:
        self._listeners.discard(listener)
        # After a notice this process is ending: its grace and the second signal stay in force.
        if self._pipe is None or self._listeners or self.noticed_at is not None:
            return
        if threading.current_thread() is threading.main_thread():
            self._uninstall()  # else SIGTERM is heard by nobody, and ends the process

    def _install(self) -> bool:
        previous = signal.getsignal(signal.SIGTERM)
        if previous == self._handle:
            # Whoever kept it when it was in force has put it back since, as Lightning does when an
            # exception ends a training.
            previous = self._previous
        if threading.current_thread() is not threading.main_thread():
            self.say_once(
                f"SIGTERM is not noticed: Python lets only the main thread handle signals, and "
                f"this is {threading.current_thread().name}"
            )
        elif previous is None:
            self.say_once("SIGTERM is not noticed: a handler outside of Python has it")
        elif previous is signal.SIG_IGN:
            self.say_once("SIGTERM is not noticed: this process ignores it")
        else:
            read_end, write_end = self._pipe = os.pipe()
            os.set_blocking(write_end, False)
            self._previous = previous
            self._first_heard = {}
            self._thread = threading.Thread(
                target=self._run, args=(read_end,), name="sigterm", daemon=True
            )
            self._thread.start()
            self._take_wakeup_fd()
            signal.signal(signal.SIGTERM, self._handle)
        return self._pipe is not None

    def _take_wakeup_fd(self) -> None:
        """Puts our pipe in front of whatever is there: event loops come and go meanwhile."""
        assert self._pipe is not None
        current = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if current not in (-1, self._pipe[1]):
            with contextlib.suppress(OSError):  # its owner has closed it
                # One number for all duplicates in turn: the thread may be writing to it.
                mine = os.dup(current) if self._chained is None else self._chained[1]
                self._chained = current, os.dup2(current, mine, inheritable=False)

    def _uninstall(self) -> None:
        assert self._pipe is not None
        assert self._thread is not None
        write_end = self._pipe[1]
        ours = self._give_back()
        os.write(write_end, _WAKE)
        self._thread.join()
        for fd in ours:
            os.close(fd)

    def _give_back(self) -> list[int]:
        """Leaves handler and wakeup descriptor as they were; what others changed since stays.

        Returns:
          Our descriptors, to be closed once the thread has ended.
        """
        assert self._pipe is not None
        (*ours, write_end), self._pipe = self._pipe, None
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, write_end):
            signal.set_wakeup_fd(current)
        if self._chained is not None:
            number, duplicate = self._chained
            with contextlib.suppress(OSError, ValueError):  # its owner has closed it
                if current == write_end and os.path.sameopenfile(number, duplicate):
                    signal.set_wakeup_fd(number)
            ours.append(duplicate)
            self._chained = None
        if signal.getsignal(signal.SIGTERM) == self._handle and not _jax_has_sigterm():
            signal.signal(signal.SIGTERM, self._previous)
        return [*ours, write_end]

    def say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning("%s; no step is saved for it", message)

    # --- hearing ---

    def _handle(self, signum: int, frame: types.FrameType | None) -> None:
        self._hear("handler")
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], _WAKE)  # somebody may have displaced our descriptor
        if callable(self._previous):
            self._previous(signum, frame)

    def _hear(self, ear: Literal["handler", "thread"]) -> None:
        """A SIGTERM came. Each ear hears one signal at most once, the handler perhaps late."""
        now = time.monotonic()
        if self.noticed_at is None:
            if not self._listeners:
                if not callable(self._previous):
                    _end("SIGTERM")
                return
            self.noticed_at = now
        if now - self._first_heard.setdefault(ear, now) > _ONE_NOTICE_SECS:
            _end("a second SIGTERM")

    def _run(self, read_end: int) -> None:
        poll = select.poll()
        poll.register(read_end, select.POLLIN)
        is_told = False
        while True:
            left = None
            if self.noticed_at is not None:
                left = max(0.0, self.noticed_at + self._grace_secs - time.monotonic()) * 1000
            if not poll.poll(left):
                _end(f"SIGTERM and {self._grace_secs:g} s of grace")
            signals = os.read(read_end, 4096)
            if self._pipe is None or self._pipe[0] != read_end:
                return
            signals = signals.replace(_WAKE, b"")
            if signals and self._chained is not None:
                with contextlib.suppress(OSError):
                    os.write(self._chained[1], signals)
            if signal.SIGTERM in signals:
                self._hear("thread")
            if self.noticed_at is not None and not is_told:
                is_told = True
                # On another thread: whoever holds the log may never let go of it.
                threading.Thread(target=self._tell, daemon=True).start()

    def _tell(self) -> None:
        logger.warning(
            "SIGTERM: the next save of a step is waited for; this process ends at the latest in "
            "%g s, or at a second SIGTERM",
            self._grace_secs,
        )

    # --- forked processes ---

    def before_fork(self) -> None:
        # A signal to the child must not be written into the pipe, which it shares with its parent.
        self._forking.mask = None
        if self._pipe is not None:
            self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def after_fork_in_parent(self) -> None:
        if self._forking.mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def after_fork_in_child(self) -> None:
        if self._pipe is not None:
            for fd in self._give_back():
                os.close(fd)
        self._listeners.clear()
        self.noticed_at = None
        self.after_fork_in_parent()


def _end(cause: str) -> NoReturn:
    """Ends the process, whatever its threads are at; the main one may not return for long."""
    with contextlib.suppress(OSError):
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if poll.poll(0):  # nothing here may wait, not even for whoever reads stderr
            os.write(2, f"torchax_ckpt: ending at once: {cause}\n".encode())
    os._exit(EXIT_CODE)


_watch = _Watch()
os.register_at_fork(
    before=_watch.before_fork,
    after_in_parent=_watch.after_fork_in_parent,
    after_in_child=_watch.after_fork_in_child,
)
