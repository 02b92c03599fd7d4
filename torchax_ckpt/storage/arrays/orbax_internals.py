"""The one file that knows Orbax from inside: its private modules, its private attributes, patches.

Orbax's public API does not let its caller say how the processes meet, which number an operation
gets, or when an array comes to the host. This file does, for operations of this package alone.
``operation`` replaces attributes of Orbax as long as any such operation runs. A replacement asks in
whose operation it is called (``_operation``), and does what the original does in any other: a
program may use Orbax by itself at the same time. What all of this relies on is checked once, at
first use, by ``check_internals``.

Source: orbax-checkpoint 0.12.8.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import importlib.metadata
import operator
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from torchax_ckpt.errors import BackendError

# As pyproject.toml has it.
REQUIREMENT = "orbax-checkpoint>=0.12.8,<0.13"


def _unlike(problem: object) -> BackendError:
    found = importlib.metadata.version("orbax-checkpoint")
    return BackendError(
        f"orbax-checkpoint {found} does not work as torchax_ckpt expects: {problem}. Install a "
        f"release that torchax_ckpt was written for: pip install '{REQUIREMENT}'."
    )


try:
    from orbax.checkpoint._src import asyncio_utils
    from orbax.checkpoint._src.futures import future, synchronization
    from orbax.checkpoint._src.metadata import array_metadata_store
    from orbax.checkpoint._src.serialization import (
        jax_array_handlers,
        replica_slices,
        tensorstore_utils,
        type_handlers,
    )
    from orbax.checkpoint._src.serialization.types import DefaultSerializationStatusCallback
    from orbax.checkpoint.experimental.v1._src.handlers.types import typestr
    from orbax.checkpoint.experimental.v1._src.saving import execution
    from orbax.checkpoint.experimental.v1._src.serialization import registry
    from orbax.checkpoint.experimental.v1._src.serialization.array_leaf_handler import (
        ArrayLeafHandler,
    )
    from orbax.checkpoint.experimental.v1._src.synchronization import multihost, thread_utils
    from orbax.checkpoint.experimental.v1._src.synchronization import synchronization as numbering
except ImportError as error:
    raise _unlike(error) from error

# --- operations of this package, and the patches they need ---------------------------------------


@dataclasses.dataclass(frozen=True)
class _Operation:
    """An operation of this package, as Orbax's code meets it.

    Attributes:
      id: takes the place of Orbax's number; differs from all of these.
      meet: waits for the other processes that carry it out, at a place with that name.
      is_alone: whether there are none.
    """

    id: str
    meet: Callable[[str], None]
    is_alone: bool


# The operation that this thread, or this task of an event loop, works for; None for those that the
# program begins itself.
_operation: contextvars.ContextVar[_Operation | None] = contextvars.ContextVar(
    "torchax_ckpt_operation", default=None
)


@contextlib.contextmanager
def operation(id: str, meet: Callable[[str], None], *, is_alone: bool) -> Iterator[None]:
    """Within it what this thread has Orbax do is one operation; see ``_Operation``.

    It must not be left before all that Orbax does for it in the background has ended.
    """
    check_internals()
    with _as_operation(_Operation(id, meet, is_alone)):
        yield


@contextlib.contextmanager
def _as_operation(ours: _Operation) -> Iterator[None]:
    with _patches:
        token = _operation.set(ours)
        try:
            yield
        finally:
            _operation.reset(token)


class _Patch(NamedTuple):
    """An attribute of Orbax, and what makes its replacement of the original."""

    module: Any
    path: str
    make: Callable[[Any], Any]


_PATCHES: list[_Patch] = []


def _replaces(module: Any, path: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        _PATCHES.append(_Patch(module, path, make))
        return make

    return register


_ABSENT = object()


class _Replaced:
    """Within it the attributes are replaced; on several threads, until the last one has left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_within = 0
        # Owner, name, original (absent where it is inherited), replacement.
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def __enter__(self) -> None:
        with self._lock:
            if self._num_within == 0:
                try:
                    for patch in _PATCHES:
                        self._replace(patch)
                except BaseException:
                    self._put_back()
                    raise
            self._num_within += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_within -= 1
            if self._num_within == 0:
                self._put_back()

    def _replace(self, patch: _Patch) -> None:
        *outer, name = patch.path.split(".")
        owner = operator.attrgetter(".".join(outer))(patch.module) if outer else patch.module
        original = vars(owner).get(name, _ABSENT)
        replacement = patch.make(getattr(owner, name) if original is _ABSENT else original)
        setattr(owner, name, replacement)
        self._replaced.append((owner, name, original, replacement))

    def _put_back(self) -> None:
        while self._replaced:
            owner, name, original, replacement = self._replaced.pop()
            if vars(owner).get(name) is not replacement:
                continue  # somebody else has replaced it since, and may call ours
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


_patches = _Replaced()


# Orbax numbers operations in one counter of the process, and reads the newest number wherever it
# needs that of the operation at hand: two that begin on two threads mix theirs up, and fail or
# hang. On several processes equal numbers must mean the same operation, which each process counts
# by itself. No upstream issue is known.
@_replaces(synchronization, "OperationIdGenerator.next_operation_id")
@_replaces(synchronization, "OperationIdGenerator.get_current_operation_id")
def _numbered(original: Any) -> Any:
    def number(cls: Any) -> Any:
        ours = _operation.get()
        return original.__get__(None, cls)() if ours is None else ours.id

    return classmethod(number)


# Orbax's barriers end after five minutes, know nothing of a process that has failed, and name
# nobody. No upstream issue is known.
@_replaces(multihost, "sync_global_processes")
def _barrier(original: Any) -> Any:
    async def sync_global_processes(key: str, **settings: Any) -> None:
        if (ours := _operation.get()) is None:
            await original(key, **settings)
        else:
            # On threads of Orbax's, while the save's own thread speaks to the same processes.
            await asyncio.to_thread(ours.meet, key)

    return sync_global_processes


# It compares the name of the directory with a collective on the devices, which from a background
# thread would cross those of the training step. No upstream issue is known; google/orbax#999 shows
# such collectives of Orbax failing.
@_replaces(execution, "_check_directory_consistency")
def _comparison(original: Any) -> Any:
    def check(directory: Any) -> None:
        if _operation.get() is None:
            original(directory)

    return check


# Orbax's threads start with an empty context: there nobody would know the operation. Threads of
# Python 3.14 may inherit it. No upstream issue is known.
@_replaces(future, "_SignalingThread.start")
def _start(original: Any) -> Any:
    def start(self: Any) -> None:
        if (ours := _operation.get()) is not None:

            def run() -> None:
                del self.run  # this one, which holds the thread
                _operation.set(ours)
                self.run()

            self.run = run
        original(self)

    return start


# TensorStore 0.1.86 never frees its answer, 7 kB each time: 1 GB in 70,000 saves. Orbax only
# reports it. No upstream issue is known.
@_replaces(tensorstore_utils, "get_tensorstore_raw_bytes")
def _raw_bytes(original: Any) -> Any:
    def ask(*args: Any, **kwargs: Any) -> int:
        return original(*args, **kwargs) if _operation.get() is None else 0

    return ask


# Where one process saves alone: Orbax takes host arrays of process 0 only, and counts whose
# metadata of arrays there is (no upstream issue is known); and it refuses arrays of one process
# (google/orbax#731 and #844, which were about arrays that all processes have).
@_replaces(type_handlers, "multihost")
@_replaces(array_metadata_store, "multihost")
@_replaces(jax_array_handlers, "jax")
class _PerhapsAlone:
    """A module, which for an operation of one process says that there is one process."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def process_count(self) -> int:
        """One, or how many there are."""
        return 1 if _is_alone() else self._module.process_count()

    def process_index(self) -> int:
        """The first, or which one this is."""
        return 0 if _is_alone() else self._module.process_index()


def _is_alone() -> bool:
    return (ours := _operation.get()) is not None and ours.is_alone


# --- what Orbax keeps for itself -----------------------------------------------------------------


def future_of(response: Any) -> concurrent.futures.Future[Any]:
    """How a save ends; to wait for it together with others."""
    return response._thread_runner._future


def stored_parts(array: jax.Array, *, use_replica_parallel: bool) -> Any:
    """The parts of an array that this process stores: ``.nbytes`` and ``.replica_slices``."""
    return replica_slices.get_replica_slices(
        array, replica_id=0, use_replica_parallel=use_replica_parallel
    )


# --- handlers ------------------------------------------------------------------------------------

StatusCallback = DefaultSerializationStatusCallback
"""What Orbax tells how far the writing of arrays is; base of ``host_batches.Batches``."""


def recorded_as(public: type) -> Callable[[type], type]:
    """Has Orbax note in each step that the item is read by its public handler."""

    def rename(handler: type) -> type:
        handler.__module__, handler.__qualname__ = public.__module__, public.__qualname__
        return handler

    return rename


class _Arrays(ArrayLeafHandler):
    """Orbax's handler of arrays, given one batch after the other."""

    async def serialize(self, params: Sequence[Any], context: Any) -> Any:
        async def write(batch: Sequence[Any]) -> Awaitable[None]:
            return await super(_Arrays, self).serialize(batch, context)

        return self._context.memory.serialization_status_callback.writing(params, write)


@recorded_as(ocp.handlers.PyTreeHandler)
class PyTreeInBatches(ocp.handlers.PyTreeHandler):
    """Orbax's handler of pytrees, with arrays written batch by batch (``host_batches.py``)."""

    def __init__(self, *, context: ocp.Context | None = None) -> None:
        leaves = registry.BaseLeafHandlerRegistry()
        entries = registry.STANDARD_TYPE_AND_ABSTRACT_TYPE_AND_TYPESTR_TO_HANDLER
        for leaf, abstract, typestrs, handler in entries:
            chosen = _Arrays if leaf is jax.Array else handler
            leaves.add(leaf, abstract, chosen, secondary_typestrs=typestrs)
        super().__init__(context=context, leaf_handler_registry=leaves)


# --- the self-test -------------------------------------------------------------------------------


@functools.cache
def check_internals() -> None:
    """Fails unless Orbax has the internals this file uses. Starts the JAX backend; some 10 ms.

    Raises:
      BackendError: names the Orbax release, what was not as expected, and what to install.
    """
    try:
        _check_operations()
        _check_handlers()
        _check_users()
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise _unlike(error) from error


def _check_operations() -> None:
    met: list[str] = []
    found: list[str] = []

    async def look() -> None:
        found.append(numbering.get_operation_id())

    with _as_operation(_Operation("self-test", met.append, True)):
        asyncio_utils.run_sync(numbering.synchronize_next_operation_id())
        assert len(met) == 1, "beginning an operation meets at another barrier"
        asyncio_utils.run_sync(look())
        future.CommitFuture(look(), name="self-test").result()
        runner = thread_utils.BackgroundThreadRunner(look())
        is_future = isinstance(runner._future, concurrent.futures.Future)
        assert is_future, "BackgroundThreadRunner._future is no Future"
        runner.result()
        assert found == ["self-test"] * 3, f"operations get their number elsewhere: {found}"


def _check_handlers() -> None:
    parts = stored_parts(jax.device_put(np.zeros(2, np.float32)), use_replica_parallel=False)
    [part] = parts.replica_slices
    assert (parts.nbytes, part.slice_args) == (8, None), "parts of arrays are cut in another way"
    assert (part.index, part.data().shape) == ((slice(None),), (2,)), "parts have other shapes"
    public, context = ocp.handlers.PyTreeHandler, ocp.Context()
    assert typestr(PyTreeInBatches) == typestr(public), "handlers are noted by other names"
    PyTreeInBatches(context=context)
    entries = registry.STANDARD_TYPE_AND_ABSTRACT_TYPE_AND_TYPESTR_TO_HANDLER
    handlers = {leaf: handler for leaf, _, _, handler in entries}
    assert handlers[jax.Array] is ArrayLeafHandler, "arrays have another handler"
    assert isinstance(_Arrays(context=context)._context, ocp.Context), "handlers lack a context"


def _check_users() -> None:
    """That what is replaced is what Orbax looks at."""
    for function, *names in (
        (execution.save_checkpointables_impl, "_check_directory_consistency"),
        (execution._SaveResponse.__init__, "_thread_runner"),
        (execution._SaveResponse._finalize_save, "multihost", "sync_global_processes"),
        (type_handlers.NumpyHandler._background_serialize, "multihost", "process_index"),
        (array_metadata_store.Validator._validate_process_count, "multihost", "process_count"),
        (jax_array_handlers.ArrayHandler.serialize, "jax", "process_count"),
        (jax_array_handlers._worker_serialize_arrays, "ts_utils", "get_tensorstore_raw_bytes"),
    ):
        code: CodeType = function.__code__
        missing = [name for name in names if name not in code.co_names]
        assert not missing, f"{code.co_qualname} uses no {', '.join(missing)}"
    assert jax_array_handlers.ts_utils is tensorstore_utils, "metrics are asked for elsewhere"
