"""Computes how stored arrays are cut into chunks (units of storage) and blocks (units of digests).

A read takes whole chunks and whole blocks. To keep reads small, the length of a block along each
dim divides that of a chunk, or is a multiple of it. Also says which process stores what.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from torchax_ckpt.devices.host_array import HostArray, Offset, offset_of
from torchax_ckpt.runtime.lazily import jax

AnyArray: TypeAlias = "jax.Array | HostArray | np.ndarray"

# The most bytes that are read, checked and kept in memory as one piece. A piece is larger if its
# dims cannot be divided so far.
MAX_BYTES = 64 << 20
# No cut makes a chunk smaller than MAX_BYTES divided by this number. A dim without small divisors
# would shrink to a few elements in one cut, and readers reject the index of millions of such
# chunks. Such a chunk therefore stays larger than MAX_BYTES.
_MIN_FRACTION = 16


def chunk_shape(array: AnyArray) -> tuple[int, ...]:
    """Returns the shape of the chunks into which the part that one device or host writes is cut.

    While a chunk exceeds ``MAX_BYTES``, the longest dim gets its next smaller divisor; first among
    dims in which the written shape is smaller than the array, then among the rest, as Orbax cuts.
    """
    written = written_shape(array)
    if _nbytes(written, array) <= MAX_BYTES:
        return written
    divisors = [_divisors(n) for n in written]
    is_divided = [n != whole for n, whole in zip(written, array.shape, strict=True)]
    chunk = list(written)
    while _nbytes(chunk, array) > MAX_BYTES and max(chunk, default=1) > 1:
        left = [dim for dim, length in enumerate(chunk) if length > 1]
        dim = max([dim for dim in left if is_divided[dim]] or left, key=chunk.__getitem__)
        smaller = [*chunk]
        divisors[dim].pop()
        smaller[dim] = divisors[dim][-1]
        if _nbytes(smaller, array) * _MIN_FRACTION < MAX_BYTES:
            break
        chunk = smaller
    return tuple(chunk)


def block_shape(array: AnyArray, *, is_stack: bool) -> tuple[int, ...]:
    """Returns the shape of an array's blocks; a block of a stack has data of only one member."""
    written, first = written_shape(array), int(is_stack)
    block = (1,) * first + written[first:]
    if _nbytes(block, array) > MAX_BYTES:
        block = (1,) * first + chunk_shape(array)[first:]
    return block


class StoredPart(NamedTuple):
    """A part of an array that this process stores."""

    start: Offset  # in the array
    device: jax.Device
    within: tuple[slice, ...] | None  # in the shard of ``device``; None for the whole shard


def stored_parts(array: jax.Array | HostArray) -> Iterator[StoredPart]:
    """Yields the parts of an array that this process stores, as ``written_shape`` says."""
    shape, sharding = tuple(array.shape), array.sharding
    part, shard = written_shape(array), _shard_shape(array)
    cut = next((dim for dim, n in enumerate(shard) if part[dim] != n), None)
    replicas = _replicas(sharding, shape)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        start = offset_of(index)
        if cut is None:
            if replicas[device] == 0:
                yield StoredPart(start, device, None)
            continue
        first = replicas[device] * part[cut]
        within = [slice(None)] * len(shard)
        within[cut] = slice(first, first + part[cut])
        start = (*start[:cut], start[cut] + first, *start[cut + 1 :])
        yield StoredPart(start, device, tuple(within))


def storing_processes(array: AnyArray) -> frozenset[int]:
    """Returns the processes that store a part of an array; process 0 for a host array."""
    if isinstance(array, np.ndarray):
        return frozenset({0})
    shape = tuple(array.shape)
    replicas = _replicas(array.sharding, shape)
    is_cut = written_shape(array) != _shard_shape(array)
    return frozenset(d.process_index for d, n in replicas.items() if is_cut or n == 0)


def num_stored_bytes(array: jax.Array | HostArray) -> int:
    """Returns how many bytes of an array this process stores."""
    return sum(1 for _ in stored_parts(array)) * _nbytes(written_shape(array), array)


@functools.lru_cache(maxsize=4096)
def _replicas(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Mapping[jax.Device, int]:
    """Returns for each device how many devices before it have the same shard."""
    seen: collections.Counter[Offset] = collections.Counter()
    replicas = {}
    for device, index in sharding.devices_indices_map(shape).items():
        start = offset_of(index)
        replicas[device] = seen[start]
        seen[start] += 1
    return replicas


def region(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Returns the slices of a part of an array, given where it begins and its shape."""
    return tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))


def num_pieces(shape: Sequence[int], piece: Sequence[int]) -> int:
    """Returns how many pieces of shape ``piece`` make up an array of shape ``shape``."""
    return math.prod(-(-n // length) for n, length in zip(shape, piece, strict=True))


def written_shape(array: AnyArray) -> tuple[int, ...]:
    """Returns the shape that one device or host writes: a shard, or a replica's part of a shard.

    Replicas share the work if an array spans processes and their number divides a dim. On one
    process the first replica writes all, so that bytes to digest and write leave the device once.
    """
    shard = _shard_shape(array)
    if isinstance(array, np.ndarray) or array.is_fully_addressable:
        return shard
    replicas = len(array.sharding.device_set) // num_pieces(array.shape, shard)
    dim = next((dim for dim, n in enumerate(shard) if n % replicas == 0), None)
    if dim is None:
        return shard
    return (*shard[:dim], shard[dim] // replicas, *shard[dim + 1 :])


def _shard_shape(array: AnyArray) -> tuple[int, ...]:
    shape = tuple(array.shape)
    return shape if isinstance(array, np.ndarray) else tuple(array.sharding.shard_shape(shape))


def _nbytes(shape: Sequence[int], array: AnyArray) -> int:
    return math.prod(shape) * array.dtype.itemsize


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
