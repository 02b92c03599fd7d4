"""Threads of this library, and waits for them that an interrupt cannot harm.

A signal handler may raise at any point of the main thread, as Ctrl-C does. Python's own waits do
not survive this: in Python 3.11, an exception within ``Thread.join`` marks a running thread as
ended, one within ``Thread.start`` or ``Event.wait`` may never release a lock that the other thread
needs, and one within an exit handler cancels the handler. Each class here therefore records what
happened in a plain attribute, and waits on a ``SimpleQueue``, which is written in C and reentrant.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import logging
import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

# An interrupted ``set`` or ``wait`` may not wake the others; they look again after this time.
_POLL_SECS = 1.0
_INTERRUPTED = 130  # as shells report Ctrl-C


class Flag:
    """A flag that is set once, and that threads wait for."""

    def __init__(self) -> None:
        self.is_set = False
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Sets the flag and wakes the threads that wait."""
        self.is_set = True
        self._wakeups.put(None)

    def wait(self, timeout_secs: float | None = None) -> bool:
        """Waits until the flag is set, or the time is over; returns whether the flag is set."""
        deadline = math.inf if timeout_secs is None else time.monotonic() + timeout_secs
        while not self.is_set and (left_secs := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._wakeups.get(timeout=min(left_secs, _POLL_SECS))
        if self.is_set:
            self._wakeups.put(None)  # for the next thread that waits
        return self.is_set


# Set once the main thread has run the program's last line. Other threads may still run user code,
# and so may exit handlers.
ending = Flag()


class Task:
    """A function that runs once, on a daemon thread of its own, named ``name``."""

    def __init__(self, name: str, run: Callable[[], object]) -> None:
        self.ended = Flag()  # set once the function has ended, or will never run
        self.is_cancelled = False  # whether it will never run
        self.pid = os.getpid()  # the thread does not exist in forked processes
        self._run = [run]  # whoever removes the function decides whether it runs
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    @property
    def thread_id(self) -> int:
        """The identifier of the thread; 0 before it runs."""
        return self._thread.ident or 0

    def stack(self) -> str:
        """Returns the call stack of the thread as text.

        Before Python 3.11.9, a garbage collection during the look at the threads could block all of
        them for ever (https://github.com/python/cpython/issues/106883), so there is none.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            frame = sys._current_frames().get(self.thread_id)
        finally:
            if collects:
                gc.enable()
        return "".join(traceback.format_stack(frame)) if frame else "unknown"

    def start(self) -> None:
        """Starts the thread; RuntimeError if there are too many, or the interpreter shuts down.

        After any other exception in here, the function may run or not; ``cancel`` decides.
        """
        try:
            # An interrupt within Thread.start may keep the new thread waiting for ever, so that a
            # thread to which signal handlers do not raise calls it.
            is_main = threading.current_thread() is threading.main_thread()
            _thread.start_new_thread(self._start, ()) if is_main else self._thread.start()
        except RuntimeError:
            self.cancel()
            raise

    def cancel(self) -> bool:
        """Returns whether the function will never run; it will not unless it has begun."""
        with contextlib.suppress(IndexError):
            self._run.pop()
            self.is_cancelled = True
            self.ended.set()
        return self.is_cancelled

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:  # too many threads: this one will do
            self._main()

    def _main(self) -> None:
        try:
            run = self._run.pop()
        except IndexError:  # cancelled
            return
        try:
            run()
        finally:
            del run  # frees its arrays now, because none may be deleted while the interpreter ends
            self.ended.set()


class Executor(ThreadPoolExecutor):
    """Runs functions on daemon threads; if no thread can be started, ``submit`` itself runs them.

    Python's own executors refuse all work once the main thread has ended, even if others go on.
    """

    def __init__(self, max_workers: int = 32, name: str = "torchax_ckpt") -> None:
        super().__init__(max_workers, name)  # asyncio accepts no other class
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Has an entry for each function that has not ended, which each need a thread.
        self._open: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._tasks: list[Task] = []
        self._is_shut = False

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Returns the future of ``fn(*args, **kwargs)``; RuntimeError after ``shutdown``."""
        if self._is_shut:  # no thread would run it
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[R] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)
            self._open.get()

        self._open.put(None)
        if len(self._tasks) < min(self._open.qsize(), self._max_workers):
            task = Task(self._name, self._work)
            try:
                task.start()
                self._tasks.append(task)
            except RuntimeError:  # too many threads
                if not self._tasks:
                    call()
                    return future
        self._calls.put(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads once all functions have run; none are cancelled."""
        self._is_shut = True
        for _ in self._tasks:
            self._calls.put(None)
        for task in self._tasks if wait else ():
            task.ended.wait()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # frees its arrays before the next wait


def run_whole(name: str, function: Callable[[], None]) -> None:
    """Calls a function that must not end halfway, and raises what it raises.

    Signal handlers raise on the main thread only. Called there, the function runs on a thread, and
    continues to its end if an exception interrupts the wait for it.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # raised again on the main thread
            errors.append(error)

    task = Task(name, run)
    try:
        task.start()
    except RuntimeError:  # no thread can be started
        return function()
    task.ended.wait()
    if errors:
        raise errors.pop()
    return None


def fail_exit() -> None:
    """Makes the last flush fail, so that Python ends with exit code 120, as for a failed cleanup.

    The alternative, ``os._exit``, would skip the other exit handlers.
    """
    stream: Any = sys.stderr or sys.stdout
    if stream is None:
        return
    flush = stream.flush

    def fail() -> None:
        flush()
        if sys.is_finalizing():
            raise OSError("the newest save failed")

    stream.flush = fail


def finish_at_exit(task: Task, lost: Callable[[], str]) -> None:
    """Waits for a started task at the end of the program, whatever interrupts the wait.

    The first interrupt is logged. A second one ends the process at once with exit code 130.
    ``lost`` returns a text that says what is lost then.
    """
    interrupt: BaseException | None = None
    while not task.ended.is_set and task.pid == os.getpid():
        try:  # also around the warning, because the second interrupt may come while it is logged
            if interrupt is not None:
                name = type(interrupt).__name__
                text = "%s at the program's end: still waiting for %s. Once more ends the program."
                logger.warning(text, name, lost())
            task.ended.wait()
        except BaseException as error:
            if interrupt is not None:
                try:
                    name = type(error).__name__
                    logger.error("%s again: ending at once. Lost: %s", name, lost())
                    for stream in (sys.stdout, sys.stderr):
                        with contextlib.suppress(Exception):
                            stream.flush()
                finally:
                    os._exit(_INTERRUPTED)
            interrupt = error
