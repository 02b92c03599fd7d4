"""The guard of a checkpointer's methods: refuses calls that cannot work, and invalid steps.

Without this guard, a call on a wrong thread, in a forked process, inside a traced function or in a
signal handler would hang or save wrong values. The library torchax keeps its random key and its
modes per thread. A forked process lacks the threads of JAX and TensorStore. Code that JAX traces
runs only once, on tracers instead of values. A signal handler may interrupt another call of the
checkpointer halfway. Collectives on another thread would interleave with those of the training
thread.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax

from torchax_ckpt.errors import CallError
from torchax_ckpt.runtime import jax_versions
from torchax_ckpt.runtime.step_numbers import as_given, as_step, is_name
from torchax_ckpt.runtime.user_messages import brief

P = ParamSpec("P")
R = TypeVar("R")

NO_COPY = (
    "a TorchaxCheckpointer can be neither copied nor pickled: it holds threads, saves in flight "
    "and the lease of its directory. Leave it out of the copy of an object that has it, in "
    "__getstate__ or __deepcopy__, or keep it outside of that object. Another process that reads "
    "steps makes its own, with CheckpointOptions(read_only=True)."
)

with jax.ensure_compile_time_eval():
    _NOT_TRACING = jax_versions.opaque_trace_state()
_home: int | None = None  # the process that created the first checkpointer and JAX's threads
# Whether this process was forked from it. A fork hook sets this, because os.getpid() is slow in
# some containers.
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
        self._running: dict[threading.Thread, str] = {}

    @property
    def is_training_thread(self) -> bool:
        """Whether this is the training thread, or the main thread while no thread trains yet."""
        return threading.current_thread() is (self._training_thread or threading.main_thread())

    @property
    def outlive_main(self) -> bool:
        """Whether Python waits for the training thread once the main thread has ended."""
        thread = self._training_thread or threading.main_thread()
        return thread is not threading.main_thread() and thread.is_alive() and not thread.daemon

    @contextlib.contextmanager
    def running(self, name: str, *, trains: bool) -> Iterator[None]:
        """Marks a call as running in the block; raises CallError if it cannot work here."""
        thread = threading.current_thread()
        self._require_possible(name, thread, trains=trains)
        try:
            self._running[thread] = name
            yield
        finally:
            self._running.pop(thread, None)

    def _require_possible(self, name: str, thread: threading.Thread, *, trains: bool) -> None:
        if _is_fork:
            raise CallError(
                f"{name} was called in process {os.getpid()}, which was forked from process "
                f"{_home}: a forked process lacks the threads of JAX and of the storage "
                "library. Call it in the parent, or start the process with multiprocessing's "
                "'spawn' method."
            )
        if jax_versions.opaque_trace_state() != _NOT_TRACING:
            raise CallError(
                f"{name} was called while JAX traces a function: it would run only once, "
                "during tracing, on tracers instead of values. Call it outside of jit, grad and "
                "vmap."
            )
        if thread in self._running:
            raise CallError(
                f"{name} was called while {self._running[thread]} is running on the "
                f"same thread, {_name(thread)}: by a signal handler, or by an attached object. "
                "In a signal handler set a flag, and check it in the training loop."
            )
        if trains:
            self._training_thread = self._training_thread or thread
            if thread is not self._training_thread:
                raise CallError(
                    f"{name} was called on thread {_name(thread)}, but this checkpointer "
                    f"belongs to thread {_name(self._training_thread)}, which used it first: "
                    "torchax keeps its random key and modes per thread, and the checkpointer's "
                    "transfers between devices of several processes must not interleave with "
                    "transfers of the training. Call attach, save and restore on the training "
                    "thread. In a run of several processes with single_replica_restore or a local "
                    "tier, also call load on the training thread."
                )


def guarded(
    *, trains: bool | Callable[[Any], bool], kind: Any = None
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Decorates a method: it raises CallError where it cannot work, and shortens tracebacks.

    The object has its ``Calls`` in ``_calls``. With a ``kind``, or a function that returns it, the
    object's ``_call_log`` compares the call with those of the other processes.
    """

    def decorate(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        name = getattr(method, "__name__", "a method")
        parameter = inspect.signature(method).parameters.get("step")
        has_step = parameter is not None
        takes_names = parameter is not None and "str" in str(parameter.annotation)
        number_of: Callable[[Any], Any] = as_given if takes_names else as_step

        @brief
        @functools.wraps(method)
        def checked(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with self._calls.running(name, trains=trains(self) if callable(trains) else trains):
                if kind is None:
                    return method(self, *args, **kwargs)
                step = args[0] if args and has_step else kwargs.get("step")
                log: Any = self._call_log
                with log.calling(name, kind(self) if callable(kind) else kind, step):
                    if step is not None and (type(step) is int or not is_name(step)):
                        log.at(number_of(step))  # an invalid step raises before any process waits
                    return method(self, *args, **kwargs)

        return checked

    return decorate


def _name(thread: threading.Thread) -> str:
    return f"{thread.name!r} ({thread.ident})"
