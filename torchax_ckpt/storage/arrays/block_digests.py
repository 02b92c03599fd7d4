"""Computes block digests: one 64-bit number for each block of stored bytes, to detect damage.

An array is cut into equal blocks (``chunking.py``); a block of a stack has data of one leaf, so a
wrong digest names the damaged leaf. The host digests the bytes that go to storage, and compares
those that come back, whatever the mesh. Changes in a device's memory, or between device and host,
are not detected.

Source: xxh3 (https://xxhash.com), 64 bits, seed 0, of a block's elements in C order.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from torchax_ckpt.devices.host_array import Offset
from torchax_ckpt.errors import ProcessError
from torchax_ckpt.layout.array_digests import Digests
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.storage.arrays import chunking
from torchax_ckpt.storage.arrays.chunking import AnyArray


def take(
    array: AnyArray, parts: Mapping[Offset, np.ndarray], *, is_stack: bool, with_long: bool = False
) -> Digests:
    """Returns an array's digests, given start -> part; 0 for blocks this process does not store."""
    block = chunking.block_shape(array, is_stack=is_stack)
    values = np.zeros(grid_shape(array.shape, block), np.uint64)
    for start, host in parts.items():
        values[_cells(start, host.shape, block)] = of_blocks(host, block)
    long = take_long(array.shape, block, parts) if with_long else None
    return Digests(block, values.astype("<u8").tobytes(), long)


def take_long(
    shape: Sequence[int], block: tuple[int, ...], parts: Mapping[Offset, np.ndarray]
) -> bytes:
    """Returns long digests of blocks: xxh3, 128 bits, big-endian, seed 0; 0 outside of parts."""
    values = np.zeros((*grid_shape(shape, block), 16), np.uint8)
    for start, host in parts.items():
        octets = b"".join(map(xxhash.xxh3_128_digest, _octets(host, block)))
        digests = np.frombuffer(octets, np.uint8).reshape(*grid_shape(host.shape, block), 16)
        values[_cells(start, host.shape, block)] = digests
    return values.tobytes()


def stored_blocks(array: AnyArray, block: tuple[int, ...]) -> np.ndarray:
    """Returns for each block of an array, in C order, whether this process stores it."""
    is_stored = np.full(grid_shape(array.shape, block), isinstance(array, np.ndarray))
    if not isinstance(array, np.ndarray):
        for part in chunking.stored_parts(array):
            is_stored[_cells(part.start, chunking.written_shape(array), block)] = True
    return is_stored.ravel()


def gathered(
    digests: Mapping[str, Digests],
    arrays: Mapping[str, AnyArray],
    places: Mapping[str, Any],  # where the leaves of each array are stored, in JSON
    processes: Processes,
) -> Mapping[str, Digests]:
    """Returns all processes' digests, on process 0; ProcessError if they do not save the same."""
    if processes.count == 1:
        return digests
    shared = {n: digests[n] for n, array in arrays.items() if not isinstance(array, np.ndarray)}
    layouts = []
    for name, known in shared.items():
        form = (arrays[name].dtype.name, arrays[name].shape, known.block, known.long is not None)
        layouts.append([name, places.get(name), *form])
    layouts_digest = xxhash.xxh3_64_digest(json.dumps(layouts).encode())
    # For each block of all arrays, its digest and its long digest, or zeros; long ones may be rare.
    rows = np.concatenate([np.zeros((0, 24), np.uint8), *map(_rows, shared.values())])
    width = 24 if any(known.long is not None for known in shared.values()) else 8
    # The digest of a block that another process stores is zero, and is not sent.
    local_blocks = np.flatnonzero(rows[:, :8].any(axis=1))
    message = (
        layouts_digest + local_blocks.astype("<u8").tobytes() + rows[local_blocks, :width].tobytes()
    )
    for index, sent in enumerate(processes.gather(message)):
        if sent[:8] != layouts_digest:
            raise ProcessError(
                f"process {index} saves other device arrays than process 0: expected the same "
                "names, shapes, dtypes and shardings on all processes. Pass the same objects to "
                "TorchaxCheckpointer.attach on every process."
            )
        count = (len(sent) - 8) // (8 + width)
        where = np.frombuffer(sent, "<u8", count, 8)
        found = np.frombuffer(sent, np.uint8, offset=8 + 8 * count)
        rows[where, :width] = found.reshape(count, width)
    if not processes.is_first:
        return digests
    merged, start = dict(digests), 0
    for name, known in shared.items():
        end = start + len(known.values) // 8
        long = None if known.long is None else rows[start:end, 8:].tobytes()
        merged[name] = Digests(known.block, rows[start:end, :8].tobytes(), long)
        start = end
    return merged


def _rows(known: Digests) -> np.ndarray:
    long = known.long or bytes(2 * len(known.values))
    parts = (known.values, 8), (long, 16)
    return np.hstack([np.frombuffer(octets, np.uint8).reshape(-1, n) for octets, n in parts])


def grid_shape(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """Returns the number of blocks along each dim of an array."""
    return tuple(math.ceil(s / b) for s, b in zip(shape, block, strict=True))


def _cells(start: Sequence[int], shape: Sequence[int], block: Sequence[int]) -> tuple[slice, ...]:
    """Returns the slices of an array's grid of blocks that a part of whole blocks covers."""
    first = [s // b for s, b in zip(start, block, strict=True)]
    return chunking.region(first, grid_shape(shape, block))


def of_blocks(host: np.ndarray, block: tuple[int, ...]) -> np.ndarray:
    """Returns one uint64 digest for each block of an array that consists of whole blocks."""
    grid = grid_shape(host.shape, block)
    values = map(xxhash.xxh3_64_intdigest, _octets(host, block))
    return np.fromiter(values, np.uint64, math.prod(grid)).reshape(grid)


def _octets(host: np.ndarray, block: tuple[int, ...]) -> Iterable[memoryview]:
    """Yields the octets of each block of an array that consists of whole blocks, in C order."""
    cut = next((dim for dim, length in enumerate(block) if length != 1), len(block))
    if host.shape[cut + 1 :] == block[cut + 1 :]:  # memory holds the blocks one after the other
        octets = np.ascontiguousarray(host).reshape(-1).view(np.uint8).data
        size = math.prod(block) * host.itemsize
        return (octets[i : i + size] for i in range(0, len(octets), size))
    return (
        np.ascontiguousarray(host[chunking.region(start, block)]).reshape(-1).view(np.uint8).data
        for start in itertools.product(*map(range, itertools.repeat(0), host.shape, block))
    )


def mismatches(
    host: np.ndarray, start: Sequence[int], known: Digests, shape: Sequence[int]
) -> list[tuple[int, ...]]:
    """Returns the blocks of a part, from ``start``, whose digests differ, as grid indices."""
    found = of_blocks(host, known.block)
    expected = np.frombuffer(known.values, "<u8").reshape(grid_shape(shape, known.block))
    covered = _cells(start, host.shape, known.block)
    differs = found != expected[covered]
    cells = zip(*np.nonzero(differs), strict=True) if host.ndim else [()] * int(differs)
    return [tuple(int(c.start + i) for c, i in zip(covered, cell, strict=True)) for cell in cells]


def fit(known: Digests, shape: Sequence[int]) -> bool:
    """Returns whether the block shape and the number of digests fit an array of ``shape``."""
    return (
        len(known.block) == len(shape)
        and all(b >= 1 and s % b == 0 for s, b in zip(shape, known.block, strict=True))
        and len(known.values) == 8 * math.prod(grid_shape(shape, known.block))
    )
