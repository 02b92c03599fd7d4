"""Moves device arrays to the host, in batches, without leaving copies beside the arrays.

JAX keeps the fetched bytes beside an array as long as that array exists. Arrays are therefore
fetched through temporary arrays, which share the buffers of the original arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import numpy as np

from torchax_ckpt.devices.device_programs import sliced
from torchax_ckpt.devices.device_sizes import HOST_MEMORY
from torchax_ckpt.devices.host_array import HostArray, Memory, Offset, offset_of
from torchax_ckpt.devices.sharding import LateParts, shards_of, stack, unshared
from torchax_ckpt.layout import batches
from torchax_ckpt.storage.arrays import chunking
from torchax_ckpt.storage.arrays.chunking import AnyArray

# Bytes of each of the two memories in which the host makes the stacks of all saves, because new
# memory takes longer than stacking. Twice the most bytes of a stack: two files are written at once.
STACK_BYTES = 128 << 20
# Smaller parts of stacks are made in memory of their own, because TensorStore may keep values of up
# to a KiB, in nodes of a database. Larger parts are not cut into such.
_SMALL_BYTES = 64 << 10

Parts = Mapping[Offset, np.ndarray]
"""Where each part of an array that this process stores begins -> the part."""


def in_batches(
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


def start(array: AnyArray, memory: Memory | None = None) -> Callable[[], Parts]:
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


def to_compare(array: AnyArray) -> Parts:
    """Returns the parts of an array, of stacks made on the host perhaps smaller ones and more."""
    if isinstance(array, HostArray) and isinstance(array.parts, LateParts):
        return array.parts.rows()
    return start(array)()


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
