"""The guard of a checkpointer's methods: raises CallError for a call that cannot work.

Without this guard, a call on a wrong thread, in a forked process, inside a traced function or in a
signal handler would hang or save wrong values. The library torchax keeps its random key and its
modes per thread. A forked process lacks the threads of JAX and TensorStore. Code that JAX traces
runs only once, on tracers instead of values. A signal handler may interrupt another call of the
checkpointer halfway. Collectives on another thread would interleave with those of the training
thread.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import jax
from jax.extend.core import get_opaque_trace_state

from torchax_ckpt.errors import CallError, CheckpointError
from torchax_ckpt.runtime import tracebacks

P = ParamSpec("P")
R = TypeVar("R")

with jax.ensure_compile_time_eval():
    _NOT_TRACING = get_opaque_trace_state()
# ``_home`` is the id of the process that created the first checkpointer and JAX's threads.
# ``_is_fork`` tells whether this process was forked from that process. A fork hook sets it, because
# os.getpid() is slow in some containers.
_home: int | None = None
_is_fork = False


def _note_fork() -> None:
    global _is_fork
    _is_fork = _home is not None


os.register_at_fork(after_in_child=_note_fork)


class Calls:
    """The calls that are running on one checkpointer, at most one per thread.

    A call with ``trains=True`` belongs on the training thread. The training thread is the thread
    that makes the first call with ``trains=True``; no other thread may make such calls.
    """

    def __init__(self) -> None:
        global _home
        _home = _home or os.getpid()
        self._training_thread: threading.Thread | None = None
        self._running: dict[threading.Thread, _Call] = {}

    @property
    def is_training_thread(self) -> bool:
        """Whether this is the training thread; False if no call has yet shown which one that is."""
        return threading.current_thread() is self._training_thread

    def begin(self, call: _Call, *, trains: bool) -> None:
        """Marks a call as running; raises CallError if it cannot work where it was made."""
        if _is_fork:
            raise CallError(
                f"{call.name} was called in process {os.getpid()}, which was forked from process "
                f"{_home}: a forked process lacks the threads of JAX and of the storage "
                "library. Call it in the parent, or start the process with multiprocessing's "
                "'spawn' method."
            )
        if get_opaque_trace_state() != _NOT_TRACING:
            raise CallError(
                f"{call.name} was called while JAX traces a function: it would run only once, "
                "during tracing, on tracers instead of values. Call it outside of jit, grad and "
                "vmap."
            )
        thread = threading.current_thread()
        if thread in self._running:
            raise CallError(
                f"{call.name} was called while {self._running[thread].name} is running on the "
                f"same thread, {_name(thread)}: by a signal handler, or by an attached object. "
                "In a signal handler set a flag, and check it in the training loop."
            )
        if trains:
            self._training_thread = self._training_thread or thread
            if thread is not self._training_thread:
                raise CallError(
                    f"{call.name} was called on thread {_name(thread)}, but this checkpointer "
                    f"belongs to thread {_name(self._training_thread)}, which used it first: "
                    "torchax keeps its random key and modes per thread, and the checkpointer's "
                    "transfers between devices of several processes must not interleave with "
                    "transfers of the training. Call attach, save and restore on the training "
                    "thread. In a run of several processes with single_replica_restore or a local "
                    "tier, also call load on the training thread."
                )
        self._running[thread] = call

    def end(self, call: _Call) -> None:
        """Removes a call from the running calls; does nothing if ``begin`` has refused the call."""
        thread = threading.current_thread()
        if self._running.get(thread) is call:
            del self._running[thread]


class _Call:
    def __init__(self, name: str) -> None:
        self.name = name


class _HasCalls(Protocol):
    _calls: Calls


S = TypeVar("S", bound=_HasCalls)


def guarded(
    *, trains: bool | Callable[[Any], bool]
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Decorates a method: it raises CallError where it cannot work, and shortens tracebacks."""

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def checked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            call = _Call(getattr(method, "__name__", "a method"))
            try:
                self._calls.begin(call, trains=trains(self) if callable(trains) else trains)
                return method(self, *args, **kwargs)
            except CheckpointError as error:
                tracebacks.shorten(error)
                raise
            finally:
                self._calls.end(call)

        return checked

    return decorate


def _name(thread: threading.Thread) -> str:
    return f"{thread.name!r} ({thread.ident})"
