"""Owns from where a checkpointer may be called: which thread, which process, and within what.

torchax keeps its random key and its modes per thread. A forked process lacks the threads that
JAX and TensorStore work with. What runs while JAX traces runs once, on tracers. And a signal
handler finds the call that it interrupted half done. Collectives on another thread would cross
those of the training. Each of these would hang, or save something wrong; here they are refused.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import jax
from jax.extend.core import get_opaque_trace_state

from torchax_ckpt.errors import CallError

P = ParamSpec("P")
R = TypeVar("R")

with jax.ensure_compile_time_eval():
    _NOT_TRACING = get_opaque_trace_state()
# The process in which the first checkpointer was made, and with it JAX's threads; and whether this
# one was forked from it. The kernel is not asked at every call: in some containers that takes long.
_home: int | None = None
_is_fork = False


def _note_fork() -> None:
    global _is_fork
    _is_fork = _home is not None


os.register_at_fork(after_in_child=_note_fork)


class Calls:
    """The calls on one checkpointer: one at a time per thread, training on one thread alone."""

    def __init__(self) -> None:
        global _home
        _home = _home or os.getpid()
        self._training_thread: threading.Thread | None = None
        self._running: dict[threading.Thread, _Call] = {}

    def begin(self, call: _Call, *, trains: bool) -> None:
        """Marks a call as running.

        Raises:
          CallError: it cannot work from here.
        """
        if _is_fork:
            raise CallError(
                f"{call.name} was called in process {os.getpid()}, which was forked from process "
                f"{_home}: the threads of JAX and its storage do not come along in a fork. Call "
                "it in the parent, or start the process with multiprocessing's 'spawn' method."
            )
        if get_opaque_trace_state() != _NOT_TRACING:
            raise CallError(
                f"{call.name} was called while JAX traces a function: it would run once, at "
                "tracing, and see tracers for values. Call it outside of jit, grad and vmap."
            )
        thread = threading.current_thread()
        if thread in self._running:
            raise CallError(
                f"{call.name} was called while {self._running[thread].name} is running on the "
                f"same thread, {_name(thread)}: from a signal handler, or from something that "
                "was attached. In a handler set a flag, and act on it in the training loop."
            )
        if trains:
            self._training_thread = self._training_thread or thread
            if thread is not self._training_thread:
                raise CallError(
                    f"{call.name} was called on thread {_name(thread)}, but this checkpointer "
                    f"belongs to thread {_name(self._training_thread)}, which used it first: "
                    "torchax keeps random key and modes per thread, and what processes send each "
                    "other over their devices must not cross what training sends. Call attach, "
                    "save and restore on the thread that trains; load too, on several processes "
                    "with single_replica_restore or a local tier."
                )
        self._running[thread] = call

    def end(self, call: _Call) -> None:
        """Marks a call as done, if it had begun."""
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
    """Makes a method raise CallError where it cannot work.

    Args:
      trains: whether it touches what belongs to the training thread; or tells that of the object.
    """

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def checked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            call = _Call(getattr(method, "__name__", "a method"))
            try:
                self._calls.begin(call, trains=trains(self) if callable(trains) else trains)
                return method(self, *args, **kwargs)
            finally:
                self._calls.end(call)

        return checked

    return decorate


def _name(thread: threading.Thread) -> str:
    return f"{thread.name!r} ({thread.ident})"
