"""Detects a preemption: under ``jax.distributed`` by JAX's preemption sync point, else by SIGTERM.

Without ``jax.distributed``, a thread detects SIGTERM through the wakeup file descriptor, to which
Python's C-level signal handler writes. A Python signal handler alone would not suffice: it runs
only when the main thread returns to Python code, and a device transfer can keep the main thread
from Python code for seconds. The thread ends the process as soon as
``CheckpointOptions.preemption_grace_secs`` seconds have passed since the first SIGTERM.

Under ``jax.distributed``, JAX installs its own SIGTERM handler. When one process gets a SIGTERM,
JAX chooses a step, and reports the preemption to every process at this step. This module then
installs no handler, which would replace JAX's. JAX installs its handler in C++, so
``signal.getsignal`` still returns the handler that JAX has replaced.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import select
import signal
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils

from torchax_ckpt.errors import CallError
from torchax_ckpt.runtime.background import Task

logger = logging.getLogger(__name__)

# The exit code that a shell reports for a process that SIGTERM ended. Every scheduler treats this
# code as a failure, unlike death by SIGTERM, which systemd, for example, treats as a clean exit.
EXIT_CODE = 128 + signal.SIGTERM
# Signals within this time count as one notice, because GNU timeout sends its child two in a row.
_ONE_NOTICE_SECS = 0.1
# JAX's preemption service counts steps in signed integers of 32 bits.
_MAX_OF_JAX = 2**31 - 1
# Bytes for the thread that reads the pipe. Python also writes the numbers of signals there.
_WAKE, _HANDLED = 0, 255


class Preemption:
    """Tells whether one checkpointer's run got a preemption notice, such as a SIGTERM.

    ``grace_secs`` is the time from a SIGTERM to the end of the process. None: a SIGTERM is no
    preemption notice, and its handling is left as it is.
    """

    def __init__(self, grace_secs: float | None) -> None:
        self.grace_secs = grace_secs
        self._reached = False
        self._decided: int | None = None

    def listen(self) -> None:
        """From now on, treats a SIGTERM as a preemption notice to this run.

        May be called before each step. Python allows only the main thread to change signal
        handlers, so a call on another thread before any on the main thread only logs, once, that
        SIGTERM is not noticed. Does nothing under ``jax.distributed``, or without ``grace_secs``.
        """
        if self.grace_secs is not None and not _jax_has_sigterm():
            _watch.add(self, self.grace_secs)

    def reached(self, step: int | None = None) -> bool:
        """Returns whether the run got a preemption notice, and so should save and end.

        Call this after ``step`` is completed. Under ``jax.distributed``, JAX reports a preemption
        at one step only, the same on all processes, so each must ask at every step. Without
        ``step``, returns the last answer. Once True, the answer stays True.
        """
        if step is not None and step != self._decided and not self._reached:
            if _jax_has_sigterm():
                self._reached = _was_early(step) or _at_sync_point(step)
            else:
                self._reached = self.grace_secs is not None and _watch.noticed_at is not None
        return self._reached

    @property
    def left_secs(self) -> float:
        """Seconds until a SIGTERM that came ends the process; infinite without one."""
        if self.grace_secs is None or _watch.noticed_at is None:
            return math.inf
        return _watch.noticed_at + self.grace_secs - time.monotonic()

    def decide(self, step: int) -> bool:
        """Returns ``reached(step)``, and fixes it, so that no loop ends at an unsaved step."""
        answer = self.reached(step)
        self._decided = step
        return answer

    def close(self) -> None:
        """Undoes ``listen``, on the main thread, unless others listen or a SIGTERM has arrived."""
        _watch.remove(self)


def exit_if(is_over: bool, close: Callable[[], None]) -> None:
    """Implements ``TorchaxCheckpointer.exit_if_preempted``."""
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        raise CallError(
            f"exit_if_preempted was called on thread {thread.name!r}, where SystemExit ends "
            "only the thread, and the exit code of the program would be 0. Call it on the main "
            "thread; on other threads call reached_preemption, and tell the main thread."
        )
    if is_over:
        close()
        raise SystemExit(EXIT_CODE)


def _jax_has_sigterm() -> bool:
    return jax.distributed.is_initialized()


def _was_early(step: int) -> bool:
    """Returns whether the notice came before this process asked JAX about a step, first ``step``.

    JAX chooses the step after the highest one that a process has asked about, and step 1 if no
    process has asked yet. After a notice during the imports or the restore, a run that goes on from
    a later step would never come to JAX's step. Only the first question of a process asks about
    step 1 as well: later, it would lower the highest step for a moment.
    """
    if _watch.was_early is None:
        _watch.was_early = step > 1 and _at_sync_point(1)
    return _watch.was_early


def _at_sync_point(step: int) -> bool:
    if step > _MAX_OF_JAX:
        _watch.say_once(f"SIGTERM is not noticed: JAX's service takes no step above {_MAX_OF_JAX}")
        return False
    try:
        return multihost_utils.reached_preemption_sync_point(step)
    except RuntimeError:
        _watch.say_once("SIGTERM is not noticed: JAX's preemption service is turned off")
        return False


class _Watch:
    """Detects SIGTERM for all checkpointers, without locks: in handlers and after forks too."""

    def __init__(self) -> None:
        self.noticed_at: float | None = None  # ``time.monotonic()`` of the first SIGTERM
        self.was_early: bool | None = None  # see ``_was_early``; None before the first question
        self._listeners: weakref.WeakSet[Preemption] = weakref.WeakSet()
        self._grace_secs = 0.0
        self._first_noticed: dict[int, float] = {}
        self._said: set[str] = set()
        self._pipe: tuple[int, int] | None = None
        self._task: Task | None = None
        self._previous: Any = signal.SIG_DFL
        # The wakeup descriptor that was set before ours: its number, and our duplicate of it. The
        # duplicate stays the same file even if the owner closes it and its number is reused.
        self._chained: tuple[int, int] | None = None
        self._forking = threading.local()

    # --- adding and removing listeners, on the main thread ---

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
        # After a notice, the grace period and the rule for a second signal remain in force.
        if self._pipe is None or self._listeners or self.noticed_at is not None:
            return
        if threading.current_thread() is threading.main_thread():
            self._uninstall()  # on other threads the handler stays, and a SIGTERM ends the process

    def _install(self) -> bool:
        previous = signal.getsignal(signal.SIGTERM)
        if previous == self._handle:
            # Another library saved our handler earlier and has now restored it, as Lightning does
            # when an exception ends a training.
            previous = self._previous
        if threading.current_thread() is not threading.main_thread():
            self.say_once(
                f"SIGTERM is not noticed: Python lets only the main thread handle signals, and "
                f"this is thread {threading.current_thread().name}"
            )
        elif previous is None:
            self.say_once("SIGTERM is not noticed: a handler outside of Python handles it")
        elif previous is signal.SIG_IGN:
            self.say_once("SIGTERM is not noticed: this process ignores it")
        else:
            try:
                self._start(previous)
            except (OSError, RuntimeError) as error:  # too many files, or threads
                self.say_once(f"SIGTERM is not noticed for now: {error}")
        return self._pipe is not None

    def _start(self, previous: Any) -> None:
        read_end, write_end = self._pipe = os.pipe()
        os.set_blocking(write_end, False)
        self._task = Task("sigterm", functools.partial(self._run, read_end))
        try:
            self._task.start()
        except RuntimeError:
            self._pipe = None
            for fd in (read_end, write_end):
                os.close(fd)
            raise
        self._previous = previous
        self._first_noticed = {}
        self._take_wakeup_fd()
        signal.signal(signal.SIGTERM, self._handle)

    def _take_wakeup_fd(self) -> None:
        """Sets a pipe as Python's wakeup descriptor; keeps the previous one, to pass signals on."""
        assert self._pipe is not None
        current = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if current not in (-1, self._pipe[1]):
            with contextlib.suppress(OSError):  # its owner has closed it
                # A later duplicate replaces the earlier one under its number, because the thread
                # may be writing to that number.
                duplicate = os.dup(current) if self._chained is None else self._chained[1]
                self._chained = current, os.dup2(current, duplicate, inheritable=False)

    def _uninstall(self) -> None:
        assert self._pipe is not None
        assert self._task is not None
        write_end = self._pipe[1]
        ours = self._give_back()
        os.write(write_end, bytes([_WAKE]))
        self._task.ended.wait()
        for fd in ours:
            os.close(fd)

    def _give_back(self) -> list[int]:
        """Restores what others have not replaced; returns the descriptors to close later.

        The thread may use them until it has ended.
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
            logger.warning("%s; no step is saved at a SIGTERM", message)

    # --- receiving signals ---

    def _handle(self, signum: int, frame: types.FrameType | None) -> None:
        """Notes a SIGTERM for ``reached`` and for the thread, whose descriptor may be replaced."""
        if self._pipe is None:  # another library has restored this handler since it was removed
            self._notice(_HANDLED)
        else:
            if self._listeners and self.noticed_at is None:
                self.noticed_at = time.monotonic()
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], bytes([_HANDLED]))
        if callable(self._previous):
            self._previous(signum, frame)

    def _notice(self, byte: int) -> None:
        """Records a SIGTERM; ends the process at one that comes over 0.1 s after the first.

        Each SIGTERM may be heard twice: as its number, at once, and as ``_HANDLED``, which Python's
        handler may write seconds later. Hence the times of the two are not compared.
        """
        now = time.monotonic()
        if self.noticed_at is None:
            if not self._listeners:
                if not callable(self._previous):
                    _end("SIGTERM")
                return
            self.noticed_at = now
        if now - self._first_noticed.setdefault(byte, now) > _ONE_NOTICE_SECS:
            _end("a second SIGTERM")

    def _run(self, read_end: int) -> None:
        poll = select.poll()
        poll.register(read_end, select.POLLIN)
        is_logged = False
        while True:
            left = None
            if self.noticed_at is not None:
                left = max(0.0, self.noticed_at + self._grace_secs - time.monotonic()) * 1000
            if not poll.poll(left):
                _end(f"SIGTERM and {self._grace_secs:g} s of grace")
            signals = os.read(read_end, 4096)
            if self._pipe is None or self._pipe[0] != read_end:
                return
            numbers = bytes(byte for byte in signals if byte not in (_WAKE, _HANDLED))
            if numbers and self._chained is not None:
                with contextlib.suppress(OSError):
                    os.write(self._chained[1], numbers)
            for byte in {signal.SIGTERM, _HANDLED} & {*signals}:
                self._notice(byte)
            if self.noticed_at is not None and not is_logged:
                is_logged = True
                # On another thread, because the logging lock may be held forever.
                with contextlib.suppress(RuntimeError):  # too many threads: this one goes on
                    Task("sigterm-log", self._log_notice).start()

    def _log_notice(self) -> None:
        logger.warning(
            "SIGTERM: the next call of save waits until its step is durable; this process ends in "
            "%g s at the latest, or at a second SIGTERM",
            self._grace_secs,
        )

    # --- forked processes ---

    def before_fork(self) -> None:
        # A signal to the child must not be written to the pipe, which parent and child share.
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
    """Ends the process immediately, without waiting for the main thread, which may be busy."""
    with contextlib.suppress(OSError):
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if poll.poll(0):  # writes only if stderr is ready, because nothing here may block
            os.write(2, f"torchax_ckpt: ending at once: {cause}\n".encode())
    os._exit(EXIT_CODE)


_watch = _Watch()
os.register_at_fork(
    before=_watch.before_fork,
    after_in_parent=_watch.after_fork_in_parent,
    after_in_child=_watch.after_fork_in_child,
)
