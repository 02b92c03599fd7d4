"""The only module that uses Orbax's internals: private modules, private attributes and patches.

Orbax's public API does not let its caller choose how the processes wait for each other, which
number an operation (a save or load) gets, or when an array is copied to the host. The context
``operation`` therefore replaces attributes of Orbax while torchax_ckpt saves or loads. Each
replacement reads the context variable ``operations.current``. If no operation of torchax_ckpt is
current, the replacement calls Orbax's original, because a program may also call Orbax directly.
Before the first operation, ``check_internals`` checks that Orbax has the attributes to replace.

Source: orbax-checkpoint 0.12.8.
"""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.metadata
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from orbax.checkpoint import v1 as ocp

from torchax_ckpt.errors import BackendError
from torchax_ckpt.runtime.replacements import Replacements
from torchax_ckpt.snapshot.host_array import HostArray
from torchax_ckpt.storage.arrays import chunking, operations
from torchax_ckpt.storage.arrays.operations import Operation
from torchax_ckpt.storage.arrays.placed_array import Place, PlacedArray, PlacedHostArray

# pyproject.toml has no upper bound, because a newer release may well work; these were tried.
REQUIREMENT = "orbax-checkpoint>=0.12.5,<=0.12.8"


def _incompatible(problem: object) -> BackendError:
    found = importlib.metadata.version("orbax-checkpoint")
    return BackendError(
        f"orbax-checkpoint {found} does not work as torchax_ckpt expects: {problem}. Install a "
        f"release that was tried: pip install '{REQUIREMENT}'."
    )


try:
    from orbax.checkpoint._src import asyncio_utils
    from orbax.checkpoint._src.futures import future, synchronization
    from orbax.checkpoint._src.metadata import array_metadata_store
    from orbax.checkpoint._src.serialization import (
        jax_array_handlers,
        replica_slices,
        serialization,
        tensorstore_utils,
        type_handlers,
    )
    from orbax.checkpoint._src.serialization.types import DefaultSerializationStatusCallback
    from orbax.checkpoint.experimental.v1._src.handlers.types import typestr
    from orbax.checkpoint.experimental.v1._src.metadata import serialization as metadata
    from orbax.checkpoint.experimental.v1._src.saving import execution
    from orbax.checkpoint.experimental.v1._src.serialization import registry
    from orbax.checkpoint.experimental.v1._src.serialization.array_leaf_handler import (
        ArrayLeafHandler,
    )
    from orbax.checkpoint.experimental.v1._src.synchronization import multihost, thread_utils
    from orbax.checkpoint.experimental.v1._src.synchronization import synchronization as numbering
except ImportError as error:
    raise _incompatible(error) from error

# --- operations of this package, and the patches they need ---------------------------------------


@contextlib.contextmanager
def operation(id: str, meet: Callable[[str], None], *, is_alone: bool) -> Iterator[None]:
    """Makes all calls of this thread one operation, until all background work for it has ended."""
    check_internals()
    with _as_operation(Operation(id, meet, is_alone)):
        yield


@contextlib.contextmanager
def _as_operation(entered: Operation) -> Iterator[None]:
    with _patches:
        token = operations.current.set(entered)
        try:
            yield
        finally:
            operations.current.reset(token)


_patches = Replacements()
_replaces = _patches.register


# Orbax numbers operations with one counter for the process, and reads the newest number where it
# needs that of the current operation. Two operations that begin on two threads mix up their
# numbers, and fail or hang. On several processes, equal numbers must mean the same operation, but
# each process counts for itself. No upstream issue is known.
@_replaces(synchronization, "OperationIdGenerator.next_operation_id")
@_replaces(synchronization, "OperationIdGenerator.get_current_operation_id")
def _numbered(original: Any) -> Any:
    def number(cls: Any) -> Any:
        numbered = operations.current.get()
        return original.__get__(None, cls)() if numbered is None else numbered.id

    return classmethod(number)


# A barrier before another one: between the two, no process but process 0 acts.
_NEEDLESS = "maybe_overwrite_existing:pre"


# Orbax's barriers end after five minutes, do not notice a failed process, and do not name the
# processes that are missing. No upstream issue is known.
@_replaces(multihost, "sync_global_processes")
def _barrier(original: Any) -> Any:
    async def sync_global_processes(key: str, **settings: Any) -> None:
        if (entered := operations.current.get()) is None:
            await original(key, **settings)
        elif not key.endswith(_NEEDLESS):
            # On Orbax's own threads, while the save's thread talks to the same processes.
            await asyncio.to_thread(entered.meet, key)

    return sync_global_processes


# Orbax takes a file that cannot be looked up for one that is missing, and its errors then hide the
# cause. No upstream issue is known.
for _module in (array_metadata_store, metadata):
    _replaces(_module, "async_path")(operations.Lookups)


# The original compares directory names through a collective on the devices. On a background thread
# it would interleave with the training step's collectives. No upstream issue is known;
# google/orbax#999 shows such collectives of Orbax failing.
@_replaces(execution, "_check_directory_consistency")
def _comparison(original: Any) -> Any:
    def check(directory: Any) -> None:
        if operations.current.get() is None:
            original(directory)

    return check


# Orbax's threads start with an empty context, which lacks the operation. In Python 3.14 threads may
# inherit the context. No upstream issue is known.
@_replaces(future, "_SignalingThread.start")
def _start(original: Any) -> Any:
    def start(self: Any) -> None:
        if (entered := operations.current.get()) is not None:

            def run() -> None:
                del self.run  # breaks a cycle: this function refers to the thread
                operations.current.set(entered)
                self.run()

            self.run = run
        original(self)

    return start


# Orbax's option knows Zstandard only, but passes any value on to this function. For a save of
# torchax_ckpt that compresses, the value is a function that returns the compressor for a chunk. No
# upstream issue is known.
@_replaces(tensorstore_utils, "_build_zarr2_metadata")
def _compressed(original: Any) -> Any:
    def build(shape: Any, chunk: Sequence[int], compressor: Any) -> dict[str, Any]:
        metadata = original(shape, chunk, bool(compressor))
        if callable(compressor):
            metadata["compressor"] = compressor(chunk)
        return metadata

    return build


# TensorStore 0.1.86 never frees the answer to this call, 7 kB each: 1 GB in 70,000 saves. Orbax
# only reports the answer. No upstream issue is known.
@_replaces(tensorstore_utils, "get_tensorstore_raw_bytes")
def _raw_bytes(original: Any) -> Any:
    def ask(*args: Any, **kwargs: Any) -> int:
        return original(*args, **kwargs) if operations.current.get() is None else 0

    return ask


# Orbax would fetch arrays itself. ``host_batches.Batches`` has already fetched the arrays that it
# passes to Orbax, because the digests need the same bytes. No upstream issue is known.
@_replaces(replica_slices, "transfer_arrays_to_host")
def _transfer(original: Any) -> Any:
    def transfer(arrays: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if not arrays or not isinstance(arrays[0], HostArray):
            return original(arrays, *args, **kwargs)
        return [_slices(array) for array in arrays]

    return transfer


@dataclasses.dataclass(frozen=True)
class _PlacedSlices(replica_slices.ReplicaSlices):
    place: Place


# Orbax writes all arrays of a process to one database. No upstream issue is known.
@_replaces(serialization, "async_serialize_from_host")
def _placed(original: Any) -> Any:
    async def write(slices: Any, spec: dict[str, Any], **settings: Any) -> Any:
        async def write_to(spec: dict[str, Any], transaction: Any) -> None:
            await original(slices, spec, **settings | {"transaction": transaction})

        if not isinstance(slices, _PlacedSlices):
            return await original(slices, spec, **settings)
        return await slices.place.store(spec, write_to)

    return write


# The same for host arrays. Orbax's method takes no transaction.
@_replaces(type_handlers, "NumpyHandler._open_and_write")
def _placed_on_host(original: Any) -> Any:
    @functools.wraps(original)  # for the self-test
    async def write(self: Any, value: np.ndarray, spec: dict[str, Any], context: Any) -> None:
        async def write_to(spec: dict[str, Any], transaction: Any) -> None:
            settings = {"context": context, "transaction": transaction}
            array = await ts.open(ts.Spec(spec), create=True, open=True, **settings)
            await array.write(value, can_reference_source_data_indefinitely=True)

        if isinstance(value, PlacedHostArray):
            await value.place.store(spec, write_to)
        else:
            await original(self, value, spec, context)

    return write


def _slices(array: HostArray) -> Any:
    """Returns Orbax's form of the parts that this process stores of an array."""
    shape = chunking.written_shape(array)
    parts = [
        replica_slices.ReplicaSlice(
            tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True)), part, None
        )
        for start, part in array.parts.items()
    ]
    content = (array.shape, shape, array.sharding, array.dtype, True, parts)
    if isinstance(array, PlacedArray):
        return _PlacedSlices(*content, array.place)
    return replica_slices.ReplicaSlices(*content)


# This is for operations of one process. Orbax writes host arrays of process 0 only, and requires
# array metadata of all processes (no upstream issue is known).
@_replaces(type_handlers, "multihost")
@_replaces(array_metadata_store, "multihost")
class _SingleProcessView:
    """Wraps a module, so that Orbax sees one process while this process saves or loads alone."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def process_count(self) -> int:
        return 1 if operations.is_alone() else self._module.process_count()

    def process_index(self) -> int:
        return 0 if operations.is_alone() else self._module.process_index()


def future_of(response: Any) -> concurrent.futures.Future[Any]:
    """Returns the future that completes when Orbax has ended the save of ``response``."""
    return response._thread_runner._future


StatusCallback = DefaultSerializationStatusCallback
"""Receives progress of array writes from Orbax; the base of ``host_batches.Batches``."""


def recorded_as(public: type) -> Callable[[type], type]:
    """Makes Orbax record ``public``, not the decorated class, as the handler of a step's item."""

    def rename(handler: type) -> type:
        handler.__module__, handler.__qualname__ = public.__module__, public.__qualname__
        return handler

    return rename


class _AnyArray(abc.ABC):  # noqa: B024  (a type for a registry, not a base class)
    """The type of arrays for Orbax: it gets HostArrays, and looks up the handler of jax.Array."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return issubclass(other, (jax.Array, HostArray))


class _Arrays(ArrayLeafHandler):
    """Extends Orbax's handler of device arrays: passes the writing to ``host_batches.Batches``."""

    async def serialize(self, params: Sequence[Any], context: Any) -> Any:
        async def write(batch: Sequence[Any]) -> Awaitable[None]:
            return await super(_Arrays, self).serialize(batch, context)

        return self._context.memory.serialization_status_callback.writing(params, write)


@recorded_as(ocp.handlers.PyTreeHandler)
class PyTreeInBatches(ocp.handlers.PyTreeHandler):
    """Extends Orbax's handler of pytrees: writes arrays in batches (``host_batches.py``)."""

    def __init__(self, *, context: ocp.Context | None = None) -> None:
        super().__init__(context=context, leaf_handler_registry=_leaf_handlers())


@functools.cache  # Orbax makes eight handlers for a save; a registry for each would take 8 ms
def _leaf_handlers() -> registry.BaseLeafHandlerRegistry:
    found = registry.BaseLeafHandlerRegistry()
    entries = registry.STANDARD_TYPE_AND_ABSTRACT_TYPE_AND_TYPESTR_TO_HANDLER
    for leaf, abstract, typestrs, handler in entries:
        own = (_AnyArray, abstract, _Arrays) if leaf is jax.Array else (leaf, abstract, handler)
        found.add(*own, secondary_typestrs=typestrs)
    return found


# --- the self-test -------------------------------------------------------------------------------


@functools.cache
def check_internals() -> None:
    """Raises BackendError unless Orbax has the internals that this module uses; takes 10 ms."""
    try:
        # On a thread: Orbax unsets the event loop of the thread on which it runs a coroutine.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(_check_operations).result()
        _check_handlers()
        _check_users()
    except Exception as error:
        raise _incompatible(error) from error


def _check_operations() -> None:
    met, found = list[str](), list[str]()

    async def look() -> None:
        found.append(numbering.get_operation_id())

    with _as_operation(Operation("self-test", met.append, True)):
        asyncio_utils.run_sync(numbering.synchronize_next_operation_id())
        assert len(met) == 1, "an operation begins without its barrier"
        asyncio_utils.run_sync(look())
        future.CommitFuture(look(), name="self-test").result()
        runner = thread_utils.BackgroundThreadRunner(look())
        assert isinstance(runner._future, concurrent.futures.Future), "saves have no Future"
        runner.result()
        assert found == ["self-test"] * 3, f"operations get their number another way: {found}"


def _check_handlers() -> None:
    where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    array = HostArray((2,), np.dtype(np.float32), where, {(0,): np.zeros(2, np.float32)})
    [part] = _slices(array).to_fragments().fragments
    assert (part.value.shape, _slices(array).nbytes) == ((2,), 8), "arrays have another form"
    public, context = ocp.handlers.PyTreeHandler, ocp.Context()
    handler = type(PyTreeInBatches(context=context))
    assert typestr(handler) == typestr(public), "handlers are recorded by other names"
    standard = {e[0]: e[3] for e in registry.STANDARD_TYPE_AND_ABSTRACT_TYPE_AND_TYPESTR_TO_HANDLER}
    assert standard[jax.Array] is ArrayLeafHandler, "arrays have another handler"
    assert isinstance(_Arrays(context=context)._context, ocp.Context), "handlers lack a context"


def _check_users() -> None:
    """Checks that Orbax's functions still use the attributes that this module replaces."""
    for function, *names in (
        (execution.save_checkpointables_impl, "_check_directory_consistency"),
        (tensorstore_utils._build_zarr_shard_and_chunk_metadata, "_build_zarr2_metadata"),
        (execution._SaveResponse.__init__, "_thread_runner"),
        (execution._SaveResponse._finalize_save, "multihost", "sync_global_processes"),
        (type_handlers.NumpyHandler._background_serialize, "multihost", "process_index"),
        (type_handlers.NumpyHandler._background_serialize, "_open_and_write"),
        (type_handlers.NumpyHandler._open_and_write, "open", "Spec", "write"),
        (array_metadata_store.Validator._validate_process_count, "multihost", "process_count"),
        (array_metadata_store.Store.read, "async_path", "exists"),
        (metadata.write, "async_path", "exists"),
        (jax_array_handlers._worker_serialize_arrays, "ts_utils", "get_tensorstore_raw_bytes"),
        (jax_array_handlers._serialize_arrays_batches_without_dispatcher, "replica_slices"),
        (jax_array_handlers._async_serialize_replica_slices, "async_serialize_from_host"),
    ):
        # Unwrapped, because another thread may be within an operation, which replaces some of them.
        code: CodeType = inspect.unwrap(function).__code__
        missing = [name for name in names if name not in code.co_names]
        assert not missing, f"{code.co_qualname} does not use {', '.join(missing)}"
    assert jax_array_handlers.ts_utils is tensorstore_utils, "metrics come from another module"
