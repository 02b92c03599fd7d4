"""Owns how stored arrays are cut: into chunks, which storage holds, and blocks, which have digests.

Reading takes whole chunks and whole blocks, so they are cut alike. Orbax cuts chunks, and is told
how far to go; what it will do is worked out here, for the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np

# The most that is read, checked and held in memory as one piece, where dims can be divided so.
MAX_BYTES = 64 << 20
# What cutting must leave. A dim without small divisors falls to a few elements at once, and the
# index of millions of such chunks is larger than a reader takes: it stays too large instead.
_MIN_FRACTION = 16


def chunk_shape(array: jax.Array | np.ndarray) -> tuple[int, ...]:
    """The shape of what storage holds in one piece: a divisor of what is written at once.

    As Orbax does it: the largest of the dims that are divided already is cut to its next divisor,
    again and again, and the other dims once those have nothing left. It cannot be told to leave
    out a dim, only when to stop.
    """
    written = _written_shape(array)
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


def chunk_limit(array: jax.Array | np.ndarray) -> int:
    """The most bytes of a chunk to allow Orbax, for it to choose ``chunk_shape``."""
    return max(MAX_BYTES, _nbytes(chunk_shape(array), array))


def block_shape(array: jax.Array | np.ndarray, *, is_stack: bool) -> tuple[int, ...]:
    """The shape of an array's blocks, of one member of a stack.

    A divisor of what is written at once: all of that, or the chunks where it is too large.
    """
    written, first = _written_shape(array), int(is_stack)
    block = (1,) * first + written[first:]
    if _nbytes(block, array) > MAX_BYTES:
        block = (1,) * first + chunk_shape(array)[first:]
    return block


def is_shared(array: jax.Array | np.ndarray) -> bool:
    """Whether each replica of a shard writes a part of it, where that can be divided.

    It spreads the work over processes. Within one the first replica writes all of it: what is
    fetched for its digest is then what is written, and leaves the devices once.
    """
    return isinstance(array, jax.Array) and not array.is_fully_addressable


def num_pieces(shape: Sequence[int], piece: Sequence[int]) -> int:
    """How many pieces of one shape make up an array."""
    return math.prod(-(-n // length) for n, length in zip(shape, piece, strict=True))


def _written_shape(array: jax.Array | np.ndarray) -> tuple[int, ...]:
    """The shape of what is written at once: a shard, or what each of its replicas writes of it."""
    shard = _shard_shape(array)
    if not (isinstance(array, jax.Array) and is_shared(array)):
        return shard
    replicas = len(array.sharding.device_set) // num_pieces(array.shape, shard)
    dim = next((dim for dim, n in enumerate(shard) if n % replicas == 0), None)
    if dim is None:
        return shard
    return (*shard[:dim], shard[dim] // replicas, *shard[dim + 1 :])


def _shard_shape(array: jax.Array | np.ndarray) -> tuple[int, ...]:
    shape = tuple(array.shape)
    return tuple(array.sharding.shard_shape(shape)) if isinstance(array, jax.Array) else shape


def _nbytes(shape: Sequence[int], array: jax.Array | np.ndarray) -> int:
    return math.prod(shape) * array.dtype.itemsize


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
