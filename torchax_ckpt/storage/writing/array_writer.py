"""Fetches the arrays of a step and writes them with TensorStore, as Orbax stores a pytree.

    STATE/ocdbt.process_N/           the database of process N: its parts of the arrays
    STATE/ocdbt.process_unchanged.../   databases of frozen arrays (``layout/unchanged.py``)
    STATE/manifest.ocdbt, d/         the database of all: references to the files of the others

All databases are OCDBT, a B-tree of keys and values in a few files; each array is Zarr version 2.

JAX keeps the fetched bytes beside an array as long as that array exists. Arrays are therefore
fetched through temporary arrays, which share the buffers of the original arrays.

Source: Orbax 0.12.8, ``serialization/tensorstore_utils.py`` and ``ocdbt_utils.py``.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from etils import epath

from torchax_ckpt.devices.device_programs import sliced
from torchax_ckpt.devices.device_sizes import HOST_MEMORY
from torchax_ckpt.devices.host_array import HostArray, Memory, Offset, offset_of
from torchax_ckpt.devices.sharding import LateParts, shards_of, stack, unshared
from torchax_ckpt.errors import SaveError
from torchax_ckpt.layout import batches
from torchax_ckpt.layout.array_digests import Digests
from torchax_ckpt.options import Codec
from torchax_ckpt.runtime.stages import stage
from torchax_ckpt.runtime.user_messages import counted
from torchax_ckpt.storage.arrays import array_checks, block_digests, chunking
from torchax_ckpt.storage.arrays.chunking import AnyArray
from torchax_ckpt.storage.medium import medium

_DATABASE = "manifest.ocdbt"  # the file that makes a folder a database, written last
# With this size several files are written, synced and read at the same time.
_DATA_FILE_BYTES = 64 << 20
# As Orbax writes: small values, such as the metadata of arrays, lie in the nodes of the tree, and
# one node holds all keys. The configuration is known, so it is not read from the database first.
_OCDBT = {
    "driver": "ocdbt",
    "config": {
        "max_inline_value_bytes": 1024,
        "max_decoded_node_bytes": 100_000_000,
        "manifest_kind": "single",
    },
    "assume_config": True,
    "cache_pool": "cache_pool#ocdbt",
}

# Smaller and faster than Zstandard alone, for weights and for moments, because the high bits of
# floating-point numbers differ little from number to number (``benchmarks/compressing.py``).
_DEFAULT_CODEC: Codec = "blosc-lz4"
# The metadata of Zarr version 2 that makes TensorStore compress so.
_COMPRESSORS: dict[Codec, dict[str, Any]] = {
    "zstd": {"id": "zstd", "level": 1},
    # Shuffles bits. LZ4 replaces repetitions, but does not encode frequent bytes in fewer bits, so
    # it gains little from shuffled bytes.
    "blosc-lz4": {"id": "blosc", "cname": "lz4", "clevel": 1, "shuffle": 2, "blocksize": 0},
    # Shuffles bytes. Zstandard chooses a code for each 128 KiB. In a block of 1 MiB, the bytes of
    # one significance fill at least 128 KiB, and share no code with others. Blosc itself would
    # choose smaller blocks, and lose the benefit.
    "blosc-zstd": {
        "id": "blosc",
        "cname": "zstd",
        "clevel": 1,
        "shuffle": 1,
        "blocksize": 1 << 20,
    },
}
_MAX_BLOSC_BYTES = (1 << 31) - 17
_MAX_ITEM_BYTES = 16
# Bytes of each of the two memories in which the host makes the stacks of all saves, because new
# memory takes longer than stacking. Twice the most bytes of a stack: two files are written at once.
STACK_BYTES = 128 << 20
# Smaller parts of stacks are made in memory of their own, because TensorStore may keep values of up
# to a KiB, in nodes of a database. Larger parts are not cut into such.
_SMALL_BYTES = 64 << 10


Parts = Mapping[Offset, np.ndarray]
"""Where each part of an array that this process stores begins -> the part."""


def folder_of_process(index: int) -> str:
    """Returns the name of the folder with the database of a process."""
    return f"ocdbt.process_{index}"


@stage("write the arrays", where=lambda state, *args, **options: state)
def write_arrays(
    state: epath.Path,  # the folder of the step's arrays
    arrays: Mapping[str, AnyArray],  # by stored name; host arrays only if this process stores them
    folders: Mapping[str, str],  # of databases of frozen arrays, by the stored names in them
    *,
    process: int = 0,  # the index of this process
    stacks: Collection[str] = (),  # the names of the arrays that are stacks
    codec: Codec | None = None,
    max_bytes: int | None = None,  # most bytes of device arrays in a batch, unless one has more
    # For stacks: with two, a batch is made in one while the batch before is written from the other.
    memories: Sequence[Memory] = (),
    # Called for each batch when it is on the host, with True for the last. From then on the
    # training program may delete the arrays of the batch.
    on_host: Callable[[bool], None] = lambda is_last: None,
) -> dict[str, Digests]:
    """Writes the parts of arrays that this process stores, and returns once they are durable.

    Returns digests of the written bytes, with zeros for other processes' blocks; with long ones for
    ``folders``. Raises SaveError for an array that readers would reject, or booleans but 0 and 1.
    """
    for name, array in arrays.items():
        _require_readable(name, array)
    context = _context()
    taken: dict[str, Digests] = {}
    planned = _in_batches(arrays, max_bytes, with_stacks=bool(memories))
    with contextlib.ExitStack() as ends:
        # Each memory with the batch that is written from it, durable before the memory is reused.
        slots = [(m, ends.enter_context(contextlib.ExitStack())) for m in memories or (None,)]
        for batch, (memory, in_flight) in zip(planned, itertools.cycle(slots), strict=False):
            in_flight.close()
            if memory:
                memory.reuse()
            copies = {name: _start_fetch(arrays[name], memory) for name in batch}
            parts = {name: copy() for name, copy in copies.items()}
            del copies  # with the temporary arrays
            on_host(batch is planned[-1])
            homes = {name: folders.get(name, folder_of_process(process)) for name in batch}
            described = [
                (folder, _array_spec(state / folder, name, arrays[name], codec), parts[name])
                for name, folder in homes.items()
            ]
            in_flight.callback(gc.collect, 0)  # JAX frees memory that numpy has viewed only then
            in_flight.enter_context(_writing(described, context))
            # Meanwhile TensorStore writes: neither holds the interpreter lock for long.
            for name in batch:
                taken[name] = _digests(
                    name, arrays[name], parts[name], name in stacks, name in folders
                )
            del parts, described
    return taken


def _in_batches(
    arrays: Mapping[str, AnyArray], max_bytes: int | None, *, with_stacks: bool
) -> list[list[str]]:
    """Returns the names of arrays that are fetched together: at most ``max_bytes``, or one array.

    Host arrays do not count, without a limit only stacks ``with_stacks``. There is one or more.
    """

    def size(name: str) -> int:
        array = arrays[name]
        if isinstance(array, np.ndarray):
            return 0
        is_late = isinstance(array, HostArray) and isinstance(array.parts, LateParts)
        is_held = isinstance(array, HostArray) and not is_late
        counts = (is_late and with_stacks) or not (max_bytes is None or is_held)
        return chunking.num_stored_bytes(array) if counts else 0

    limit = STACK_BYTES if max_bytes is None else max_bytes
    return [*batches.batches(arrays, size, limit)] or [[]]


def _start_fetch(array: AnyArray, memory: Memory | None = None) -> Callable[[], Parts]:
    """Starts to copy an array's parts to the host; returns a function that waits for the copies."""
    if isinstance(array, np.ndarray):
        return lambda: {(0,) * array.ndim: array}
    if isinstance(array, HostArray):
        return lambda: _cut_shards(array, memory or Memory(0))
    # JAX would keep the host's copy beside the original array.
    shards = {shard.device: shard.data for shard in shards_of(unshared(array))}
    is_on_host = array.sharding.memory_kind in HOST_MEMORY
    copies: list[tuple[Offset, jax.Array, tuple[slice, ...] | None]] = []
    for part in chunking.stored_parts(array):
        shard, within = shards[part.device], part.within
        # A program that cuts a small array in memory of the host might hang: Orbax avoids that too.
        if within is not None and not is_on_host:
            shard, within = sliced(shard, within), None
        shard.copy_to_host_async()
        copies.append((part.start, shard, within))

    def fetch() -> Parts:
        found = {}
        for at, shard, within in copies:
            host = np.asarray(shard)
            found[at] = host if within is None else host[within]
        return found

    return fetch


def parts_to_compare(array: AnyArray) -> Parts:
    """Returns the parts of an array, of stacks made on the host perhaps smaller ones and more."""
    if isinstance(array, HostArray) and isinstance(array.parts, LateParts):
        return array.parts.rows()
    return _start_fetch(array)()


def _cut_shards(array: HostArray, memory: Memory) -> Parts:
    """Returns the parts that this process stores, cut from the shards of a host array."""
    index_of = array.sharding.addressable_devices_indices_map(array.shape)
    parts = {}
    for part in chunking.stored_parts(array):
        offset = offset_of(index_of[part.device])
        shards = array.parts
        if isinstance(shards, LateParts):
            whole = (slice(None),) * array.ndim
            members, *within = part.within or whole
            rows = [row[tuple(within)] for row in shards.members(offset, members)]
            is_small = len(rows) * rows[0].nbytes < _SMALL_BYTES
            out = None if is_small else memory.array((len(rows), *rows[0].shape), rows[0].dtype)
            parts[part.start] = stack(rows, out)
        else:
            shard = shards[offset]
            parts[part.start] = shard if part.within is None else shard[part.within]
    return parts


@contextlib.contextmanager
def _writing(
    batch: Iterable[tuple[str, dict[str, Any], Parts]], context: ts.Context
) -> Iterator[None]:
    """Begins to write arrays, one transaction for each folder; in the end, all is durable."""
    transactions = collections.defaultdict[str, ts.Transaction](lambda: ts.Transaction(atomic=True))
    opened, commits = [], []
    copies: list[ts.Future[Any]] = []
    try:
        for folder, spec, parts in batch:
            if not parts:  # this process stores none of the array
                continue
            opening = ts.open(spec, context=context, transaction=transactions[folder])
            opened.append((opening, spec, parts))
        for opening, spec, parts in opened:
            store = opening.result()
            assert store.kvstore is not None
            # TensorStore itself writes metadata only if there is none, which fails if the commit is
            # sent to a bucket again because its answer was lost.
            encoded = json.dumps(spec["metadata"], sort_keys=True, separators=(",", ":"))
            copies.append(store.kvstore.write(".zarray", encoded))
            for start, part in parts.items():
                region = store[chunking.region(start, part.shape)]
                written = region.write(part, can_reference_source_data_indefinitely=True)
                copies.append(written.copy)
        for copy in copies:
            copy.result()  # a commit before would leave out chunks
        commits = [each.commit_async() for each in transactions.values()]
        yield
    except BaseException:
        for each in transactions.values():
            each.abort()
        raise
    finally:
        # Whatever happened: nothing is written any more after this.
        failures = [commit.exception() for commit in commits]
    for failure in filter(None, failures):
        raise failure


def merge(state: epath.Path, folders: Iterable[str], names: Iterable[str]) -> None:
    """Writes the database of all, of references; SaveError if it lacks a chunk of ``names``."""
    context = _context()  # one for all, or TensorStore copies no references
    transaction = ts.Transaction(atomic=True)
    opening = [ts.KvStore.open(_kvstore(state / f), context=context) for f in folders]
    root = ts.KvStore.open(_kvstore(state), context=context).result()
    merged = root.with_transaction(transaction)
    copies = [each.result().experimental_copy_range_to(merged) for each in opening]
    for copy in copies:
        copy.result()
    found: dict[str, int] = {}
    for stored in merged.list().result():
        array = stored.decode().rpartition("/")[0]
        found[array] = found.get(array, 0) + 1
    keys = {name: array_checks.stored_key(name) for name in names}
    reads = {name: merged.read(f"{key}/.zarray") for name, key in keys.items()}
    for name, key in keys.items():
        content = reads[name].result()
        # An array that an earlier step wrote for other devices may have other chunks.
        described = json.loads(content.value) if content.state == "value" else None
        count = chunking.num_pieces(described["shape"], described["chunks"]) if described else 1
        num_found = found.get(key, 1) - 1  # without the metadata
        if num_found != count:
            raise SaveError(
                f"{name}: expected {counted(count, 'chunk')} in the new step, found {num_found}: "
                f"another program removes files in {state}, or the processes of this run did not "
                "save the same arrays",
                key_path=name,
            )
    transaction.commit_async().result()
    if keys and not _is_here(state):
        raise SaveError(
            f"{state}: expected the database of the arrays, {_DATABASE}, which TensorStore has "
            "just written, found none: TensorStore takes this path for that of another folder. "
            "Save to a directory whose path has only letters, digits and slashes"
        )


def _is_here(state: epath.Path) -> bool:
    """Returns whether a database lies in a folder, as all but TensorStore know the folder."""
    return any(medium.of(state).files(state, _DATABASE))


def _context() -> ts.Context:
    settings = {"cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}}
    return ts.Context({**settings, "file_io_concurrency": {"limit": 128}})


def _kvstore(folder: epath.Path) -> dict[str, Any]:
    """Returns the spec of a database that is written, or whose references are copied."""
    return {**_OCDBT, **medium.of(folder).database_to_write(folder)}


def _array_spec(
    folder: epath.Path, name: str, array: AnyArray, codec: Codec | None
) -> dict[str, Any]:
    chunk = chunking.chunk_shape(array)
    chunk_bytes = math.prod(chunk) * array.dtype.itemsize
    return {
        "driver": "zarr",
        "kvstore": {
            **_kvstore(folder),
            "path": f"{array_checks.stored_key(name)}/",
            "target_data_file_size": max(_DATA_FILE_BYTES, chunk_bytes),
        },
        "metadata": {
            "zarr_format": 2,
            "shape": array.shape,
            "chunks": chunk,
            "dtype": array_checks.stored_dtype(array.dtype.name),
            "compressor": zarr_compressor(codec, chunk) if codec else None,
            "fill_value": None,
            "filters": None,
            "order": "C",
            "dimension_separator": ".",
        },
        "open": True,
        "assume_metadata": True,  # which ``_writing`` writes
        "recheck_cached_data": False,
        "store_data_equal_to_fill_value": True,
    }


def codec_of(option: bool | Codec) -> Codec | None:
    """Returns the codec for which ``CheckpointOptions.compression`` asks; None for none."""
    return _DEFAULT_CODEC if option is True else option or None


def zarr_compressor(codec: Codec, chunk: Sequence[int]) -> dict[str, Any]:
    """Returns Zarr's metadata of a compressor; Zstandard if a chunk may be too large for Blosc."""
    is_too_large = math.prod(chunk) * _MAX_ITEM_BYTES > _MAX_BLOSC_BYTES
    return dict(_COMPRESSORS["zstd" if is_too_large else codec])


def _digests(name: str, array: AnyArray, parts: Parts, is_stack: bool, with_long: bool) -> Digests:
    if array.dtype == np.bool_ and any((p.view(np.uint8) > 1).any() for p in parts.values()):
        raise SaveError(
            f"{name}: expected booleans whose bytes are 0 or 1, found other bytes, which "
            "storage does not preserve; compute the array again, for example as x != 0",
            key_path=name,
        )
    return block_digests.take(array, parts, is_stack=is_stack, with_long=with_long)


def _require_readable(name: str, array: AnyArray) -> None:
    """Raises if readers would reject an array because of its size."""
    count = chunking.num_pieces(array.shape, chunking.chunk_shape(array))
    if count > array_checks.MAX_CHUNKS:
        raise SaveError(
            f"{name}: expected an array of at most {array_checks.MAX_CHUNKS} chunks, found {count} "
            f"chunks in {array.dtype}{list(array.shape)}; divide the array into several",
            key_path=name,
        )
