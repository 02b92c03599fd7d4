"""Computes block digests: one 64-bit number for each block of stored bytes, to detect damage.

An array is cut into equal blocks (``chunking.py``); a block of a stack has data of one leaf, so a
wrong digest names the damaged leaf. The host digests the bytes that go to storage, and compares
those that come back, whatever the mesh. Changes in a device's memory, or between device and host,
are not detected.

Source: xxh3 (https://xxhash.com), 64 bits, seed 0, of a block's elements in C order.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from torchax_ckpt.errors import ProcessError
from torchax_ckpt.layout.manifest import Digests
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.snapshot.host_array import Offset
from torchax_ckpt.storage.arrays import chunking
from torchax_ckpt.storage.arrays.chunking import AnyArray

Index = tuple[slice, ...]


def take(
    array: AnyArray, parts: Mapping[Offset, np.ndarray], *, is_stack: bool, with_long: bool = False
) -> Digests:
    """Returns an array's digests, given start -> part; 0 for blocks this process does not store."""
    block = chunking.block_shape(array, is_stack=is_stack)
    values = np.zeros(grid_shape(array.shape, block), np.uint64)
    for start, host in parts.items():
        found = of_blocks(host, block)
        at = tuple(
            slice(s // b, s // b + n) for s, b, n in zip(start, block, found.shape, strict=True)
        )
        values[at] = found
    long = take_long(array.shape, block, parts) if with_long else None
    return Digests(block, values.astype("<u8").tobytes(), long)


def take_long(
    shape: Sequence[int], block: tuple[int, ...], parts: Mapping[Offset, np.ndarray]
) -> bytes:
    """Returns the long digests of blocks: xxh3, 128 bits, big-endian, seed 0; 0 outside of parts.

    ``parts`` is start -> part, each of whole blocks.
    """
    grid = grid_shape(shape, block)
    values = np.zeros((*grid, 16), np.uint8)
    for start, host in parts.items():
        first = [s // b for s, b in zip(start, block, strict=True)]
        found = b"".join(map(xxhash.xxh3_128_digest, _octets(host, block)))
        within = grid_shape(host.shape, block)
        at = tuple(slice(f, f + n) for f, n in zip(first, within, strict=True))
        values[at] = np.frombuffer(found, np.uint8).reshape(*within, 16)
    return values.tobytes()


def stored_blocks(array: AnyArray, block: tuple[int, ...]) -> np.ndarray:
    """Returns for each block of an array, in C order, whether this process stores it."""
    grid = grid_shape(array.shape, block)
    found = np.full(grid, isinstance(array, np.ndarray))
    if not isinstance(array, np.ndarray):
        size = grid_shape(chunking.written_shape(array), block)
        for part in chunking.stored_parts(array):
            first = [s // b for s, b in zip(part.start, block, strict=True)]
            found[tuple(slice(f, f + n) for f, n in zip(first, size, strict=True))] = True
    return found.ravel()


def gathered(
    digests: Mapping[str, Digests],
    arrays: Mapping[str, AnyArray],
    places: Mapping[str, Any],
    processes: Processes,
) -> Mapping[str, Digests]:
    """Returns, on process 0, which writes the manifest, the digests of all processes.

    ``places`` says where the leaves of each array are stored, in JSON.

    Raises ProcessError if the processes do not save the same arrays at the same places.
    """
    if processes.count == 1:
        return digests
    shared = [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]
    layouts = [
        [
            n,
            places.get(n),
            arrays[n].dtype.name,
            arrays[n].shape,
            digests[n].block,
            digests[n].long is not None,
        ]
        for n in shared
    ]
    layouts_digest = xxhash.xxh3_64_digest(json.dumps(layouts).encode())
    all_values = np.concatenate([np.zeros(0, "<u8"), *(_values(digests[name]) for name in shared)])
    # The long digests of blocks that have them, and for each block whether it has one.
    all_long = np.concatenate([np.zeros((0, 16), "u1"), *(_long(digests[name]) for name in shared)])
    has_long = np.concatenate(
        [
            np.zeros(0, bool),
            *(np.full(len(_values(digests[n])), digests[n].long is not None) for n in shared),
        ]
    )
    # The digest of a block that another process stores is zero, and is not sent.
    local_blocks = np.flatnonzero(all_values)
    message = (
        layouts_digest
        + len(local_blocks).to_bytes(8)
        + local_blocks.astype("<u8").tobytes()
        + all_values[local_blocks].tobytes()
        + all_long[local_blocks[has_long[local_blocks]]].tobytes()
    )
    for index, sent in enumerate(processes.gather(message)):
        if sent[:8] != layouts_digest:
            raise ProcessError(
                f"process {index} saves other device arrays than process 0: expected the same "
                "names, shapes, dtypes and shardings on all processes. Pass the same objects to "
                "Checkpointer.attach on every process."
            )
        count = int.from_bytes(sent[8:16])
        where, values = np.frombuffer(sent, "<u8", 2 * count, 16).reshape(2, count)
        all_values[where] = values
        long = np.frombuffer(sent[16 + 16 * count :], "u1").reshape(-1, 16)
        all_long[where[has_long[where]]] = long
    if not processes.is_first:
        return digests
    ends = itertools.accumulate(len(_values(digests[name])) for name in shared)
    merged, start = dict(digests), 0
    for name, end in zip(shared, ends, strict=True):
        merged_digests = Digests(digests[name].block, all_values[start:end].tobytes())
        if digests[name].long is not None:
            merged_digests = dataclasses.replace(merged_digests, long=all_long[start:end].tobytes())
        merged[name] = merged_digests
        start = end
    return merged


def _values(known: Digests) -> np.ndarray:
    return np.frombuffer(known.values, "<u8")


def _long(known: Digests) -> np.ndarray:
    """Returns the long digests, 16 octets for each block; zeros if there are none."""
    octets = known.long if known.long is not None else bytes(2 * len(known.values))
    return np.frombuffer(octets, "u1").reshape(-1, 16)


def grid_shape(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """Returns the number of blocks along each dim of an array."""
    return tuple(math.ceil(s / b) for s, b in zip(shape, block, strict=True))


def of_blocks(host: np.ndarray, block: tuple[int, ...]) -> np.ndarray:
    """Returns one uint64 digest for each block of an array that consists of whole blocks."""
    grid = grid_shape(host.shape, block)
    found = map(xxhash.xxh3_64_intdigest, _octets(host, block))
    return np.fromiter(found, np.uint64, math.prod(grid)).reshape(grid)


def _octets(host: np.ndarray, block: tuple[int, ...]) -> Iterable[memoryview]:
    """Yields the octets of each block of an array that consists of whole blocks, in C order."""
    if _are_contiguous(host.shape, block):
        octets = np.ascontiguousarray(host).reshape(-1).view(np.uint8).data
        size = math.prod(block) * host.itemsize
        return (octets[i : i + size] for i in range(0, len(octets), size))
    return (
        np.ascontiguousarray(host[_region(cell, block)]).reshape(-1).view(np.uint8).data
        for cell in np.ndindex(grid_shape(host.shape, block))
    )


def _are_contiguous(shape: tuple[int, ...], block: tuple[int, ...]) -> bool:
    """Returns whether memory holds the blocks one after the other, in C order of the blocks."""
    cut = next((dim for dim, length in enumerate(block) if length != 1), len(block))
    return shape[cut + 1 :] == block[cut + 1 :]


def _region(cell: Sequence[int], block: Sequence[int]) -> Index:
    return tuple(slice(i * b, (i + 1) * b) for i, b in zip(cell, block, strict=True))


def mismatches(
    host: np.ndarray, start: Sequence[int], known: Digests, shape: Sequence[int]
) -> list[tuple[int, ...]]:
    """Returns the blocks of a part, from ``start``, whose digests differ, as grid indices."""
    found = of_blocks(host, known.block)
    first = [s // b for s, b in zip(start, known.block, strict=True)]
    expected = np.frombuffer(known.values, "<u8").reshape(grid_shape(shape, known.block))
    differs = (
        found != expected[tuple(slice(f, f + n) for f, n in zip(first, found.shape, strict=True))]
    )
    cells = zip(*np.nonzero(differs), strict=True) if host.ndim else [()] * int(differs)
    return [tuple(int(f + i) for f, i in zip(first, cell, strict=True)) for cell in cells]


def fit(known: Digests, shape: Sequence[int]) -> bool:
    """Returns whether the block shape and the number of digests fit an array of ``shape``."""
    return (
        len(known.block) == len(shape)
        and all(b >= 1 and s % b == 0 for s, b in zip(shape, known.block, strict=True))
        and len(known.values) == 8 * math.prod(grid_shape(shape, known.block))
    )
