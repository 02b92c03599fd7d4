"""Puts pieces of stored arrays together into leaves, and moves the leaves to their devices.

A piece, the unit of reads, consists of whole chunks and whole blocks, so that its digests can be
compared. A device's part goes to the device once its pieces are read; the members of a stack
(several leaves stored as one array) go together, once all pieces of the stack are.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from torchax_ckpt.devices.host_array import Local, Placement
from torchax_ckpt.layout.array_digests import Digests
from torchax_ckpt.runtime.lazily import jax
from torchax_ckpt.storage.arrays import chunking

Index = tuple[slice, ...]
Bounds = tuple[tuple[int, int], ...]

# Alignment of memory that a CPU device can use without a copy.
_ALIGNMENT = 64
# From this size on numpy asks the system for huge pages, which many virtual machines first have to
# assemble. Writing such an array once then took four times as long as on plain pages.
_LARGE_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A stored array to read; ``shape`` includes the leading axis of a stack.

    ``placements`` is leaf -> where it goes, for the array itself or the requested members of a
    stack; ``members`` are all of the stack, in order. Nothing is compared if ``digests`` is None.
    """

    shape: tuple[int, ...]
    dtype: str
    placements: Mapping[str, Placement]
    digests: Digests | None
    members: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a stored array that is read as one unit, in whole blocks and whole chunks."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int

    @property
    def index(self) -> Index:
        """The slices of the stored array that the piece covers."""
        return chunking.region(self.start, self.shape)


def overlap(bounds: Bounds, index: Index) -> tuple[Index, Index] | None:
    """Returns the slices of a region and of a part that have the same elements; None if none."""
    both = [(max(a, s.start), min(b, s.stop)) for (a, b), s in zip(bounds, index, strict=True)]
    if any(low >= high for low, high in both):
        return None
    of_region = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, bounds, strict=True))
    of_part = tuple(slice(a - s.start, b - s.start) for (a, b), s in zip(both, index, strict=True))
    return of_region, of_part


class _Region:
    """Puts together, from pieces, the part of an array that one or more devices will hold."""

    def __init__(self, bounds: Bounds, dtype: np.dtype[Any]) -> None:
        self.bounds = bounds
        self.start = tuple(start for start, _ in bounds)
        self.shape = tuple(stop - start for start, stop in bounds)
        self.nbytes = math.prod(self.shape) * dtype.itemsize
        self.is_awaited = False
        self._dtype = dtype
        self._missing = math.prod(self.shape)
        self._host: np.ndarray | None = None

    def is_piece(self, piece: Piece) -> bool:
        """Returns whether the piece is exactly this region, so that no copy is needed."""
        return (piece.start, piece.shape) == (self.start, self.shape)

    def take(self, piece: Piece, host: np.ndarray) -> np.ndarray | None:
        """Adds a piece; returns the region's array if it completes the region, else None."""
        if self.is_piece(piece):
            return host
        if (both := overlap(self.bounds, piece.index)) is None:
            return None
        if self._host is None:
            self._host = empty(self.shape, self._dtype)
        here, of_piece = both
        self._host[here] = host[of_piece]
        self._missing -= host[of_piece].size
        if self._missing:
            return None
        whole, self._host = self._host, None
        return whole


class Target:
    """Receives the pieces of one array; adds each leaf to ``leaves`` when the leaf is complete.

    ``nbytes`` are those of all parts of the array that are put together from pieces. This class
    itself keeps nothing: its pieces are only compared, or taken by the caller.
    """

    nbytes = 0

    def __init__(self, name: str, wanted: Wanted, leaves: dict[str, Any]) -> None:
        self.name = name
        self.wanted = wanted
        self._leaves = leaves
        self._dtype = np.dtype(wanted.dtype)

    def pieces(self, chunk: Sequence[int]) -> Iterator[Piece]:
        """Yields the pieces to read, in the order of reading; ``chunk`` is the shape of a chunk."""
        everything = _Region(bounds_of(None, self.wanted.shape), self._dtype)
        return self._pieces(self._unit(chunk), [everything])

    def awaits(self, piece: Piece) -> tuple[int, int]:
        """Announces a piece that will be read; returns two sizes in bytes.

        The first is that of the buffer for the piece, which is freed when the piece has arrived.
        The second is that of the buffers for the parts that the piece is the first to touch, which
        are freed when the parts are on their devices.
        """
        return piece.nbytes, 0

    def arrived(self, piece: Piece, host: np.ndarray) -> tuple[int, list[jax.Array]]:
        """Takes a read piece; returns the bytes and the moving arrays of parts it completes."""
        raise NotImplementedError

    def _unit(self, chunk: Sequence[int]) -> list[int]:
        """Returns the shape of a piece, which consists of whole chunks and whole blocks."""
        known = self.wanted.digests
        return [
            min(n, math.lcm(c, b))
            for n, c, b in zip(
                self.wanted.shape, chunk, known.block if known else chunk, strict=True
            )
        ]

    def _pieces(self, unit: Sequence[int], regions: Iterable[_Region]) -> Iterator[Piece]:
        """Yields the pieces that make up the regions, each piece once."""
        cells: dict[tuple[int, ...], None] = {}
        for region in regions:
            ranges = (
                range(s // u, -(-(s + n) // u))
                for s, n, u in zip(region.start, region.shape, unit, strict=True)
            )
            cells.update(dict.fromkeys(itertools.product(*ranges)))
        for cell in cells:
            start = tuple(i * u for i, u in zip(cell, unit, strict=True))
            extent = tuple(
                min(u, n - s) for u, n, s in zip(unit, self.wanted.shape, start, strict=True)
            )
            yield Piece(start, extent, math.prod(extent) * self._dtype.itemsize)


class _Assembled(Target):
    """Receives an array in the parts that the devices of this process, or its host, will hold."""

    def __init__(
        self, name: str, wanted: Wanted, leaves: dict[str, Any], parts: Iterable[Bounds]
    ) -> None:
        super().__init__(name, wanted, leaves)
        self._regions = {bounds: _Region(bounds, self._dtype) for bounds in parts}
        self.nbytes = sum(region.nbytes for region in self._regions.values())
        self._missing = len(self._regions)

    def pieces(self, chunk: Sequence[int]) -> Iterator[Piece]:
        """Yields the pieces that contain the parts."""
        return self._pieces(self._unit(chunk), self._regions.values())

    def awaits(self, piece: Piece) -> tuple[int, int]:
        """See ``Target``. If the piece is exactly a part, they have one buffer: the second."""
        nbytes, parts = piece.nbytes, 0
        for bounds, region in self._regions.items():
            if not region.is_awaited and overlap(bounds, piece.index) is not None:
                region.is_awaited = True
                parts += region.nbytes
                if region.is_piece(piece):
                    nbytes = 0
        return nbytes, parts

    def _completed(self, piece: Piece, host: np.ndarray) -> Iterator[tuple[Bounds, np.ndarray]]:
        """Yields the parts that a piece completes."""
        for bounds, region in self._regions.items():
            if (whole := region.take(piece, host)) is not None:
                self._missing -= 1
                yield bounds, whole


class SingleLeaf(_Assembled):
    """Receives an array that is one leaf; sends each device its part once the part is complete."""

    def __init__(self, name: str, wanted: Wanted, leaves: dict[str, Any]) -> None:
        ((self._leaf, self._placement),) = wanted.placements.items()
        self._shards: list[Any] = []
        self._devices: dict[Bounds, list[Any]] = {}
        for device, bounds in _devices(self._placement, wanted.shape):
            self._devices.setdefault(bounds, []).append(device)
        super().__init__(name, wanted, leaves, self._devices)

    def arrived(self, piece: Piece, host: np.ndarray) -> tuple[int, list[jax.Array]]:
        """Receives a piece; sends the parts that the piece completes to their devices."""
        moving: list[jax.Array] = []
        nbytes = 0
        for bounds, whole in self._completed(piece, host):
            nbytes += whole.nbytes
            if self._placement is Local.HOST:
                self._shards.append(whole)
            else:
                devices = self._devices[bounds]
                targets = [None if to is Local.DEFAULT_DEVICE else to for to in devices]
                moving += jax.device_put([whole] * len(targets), targets)
        self._shards += moving
        if self._missing:
            return nbytes, moving
        leaf, *_ = self._shards
        if not isinstance(self._placement, Local):
            leaf = jax.make_array_from_single_device_arrays(
                self.wanted.shape, self._placement, self._shards, dtype=leaf.dtype
            )
        self._leaves[self._leaf] = leaf
        return nbytes, moving


class Stack(_Assembled):
    """Receives a stack; sends all its leaves to their devices after the last piece was read."""

    def __init__(self, name: str, wanted: Wanted, leaves: dict[str, Any]) -> None:
        rows, *shape = wanted.shape
        self._shape = tuple(shape)
        placements = {*wanted.placements.values()}
        parts = (part for placement in placements for _, part in _devices(placement, self._shape))
        # Each part has all members.
        super().__init__(name, wanted, leaves, (((0, rows), *part) for part in parts))
        self._parts: dict[Bounds, np.ndarray] = {}
        self._index = {member: i for i, member in enumerate(wanted.members)}

    def _unit(self, chunk: Sequence[int]) -> list[int]:
        return [self.wanted.shape[0], *super()._unit(chunk)[1:]]

    def arrived(self, piece: Piece, host: np.ndarray) -> tuple[int, list[jax.Array]]:
        """Receives a piece; after the last piece, sends all members to their devices."""
        for (_, *part), whole in self._completed(piece, host):
            self._parts[tuple(part)] = whole
        if self._missing:
            return 0, []
        moving: list[jax.Array] = []
        single: dict[str, np.ndarray] = {}
        for leaf, placement in self.wanted.placements.items():
            part_at = functools.partial(self._part, self._index[leaf])
            if not isinstance(placement, Local):
                # Members are small and many: for four devices, this call takes a seventh of the
                # time of a transfer to each and of making one array of the four.
                array = jax.make_array_from_callback(
                    self._shape, placement, part_at, dtype=self._dtype
                )
                self._leaves[leaf] = array
                moving.append(array)
            elif placement is Local.HOST:
                self._leaves[leaf] = part_at(None).copy()  # a view would keep the stack alive
            else:
                single[leaf] = part_at(None)
        self._leaves.update(zip(single, jax.device_put(list(single.values())), strict=True))
        moving += [self._leaves[leaf] for leaf in single]
        self._parts.clear()
        return self.nbytes, moving

    def _part(self, member: int, index: Index | None) -> np.ndarray:
        return self._parts[bounds_of(index, self._shape)][member, ...]


def _devices(placement: Placement, shape: tuple[int, ...]) -> list[tuple[Any, Bounds]]:
    """Returns (device, bounds of its part) for this process's devices, or (placement, whole)."""
    if not isinstance(placement, Local):
        memory = placement.memory_kind
        return [
            (_single(device, memory), bounds_of(index, shape))
            for device, index in placement.addressable_devices_indices_map(shape).items()
        ]
    return [(placement, bounds_of(None, shape))]


def bounds_of(index: Index | None, shape: tuple[int, ...]) -> Bounds:
    """Returns (start, stop) of the slice for each dim; an index of None means the whole array."""
    if index is None:
        return tuple((0, length) for length in shape)
    return tuple(part.indices(length)[:2] for part, length in zip(index, shape, strict=True))


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Returns a new host array, aligned so that JAX on CPU can use its memory without a copy.

    Safe, because nothing else writes to it, and JAX does not reuse donated memory it does not own.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LARGE_BYTES:
        octets = np.empty(nbytes + _ALIGNMENT, np.uint8)
        skipped = -octets.ctypes.data % _ALIGNMENT
        return octets[skipped : skipped + nbytes].view(dtype).reshape(shape)
    try:
        pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # numpy would raise MemoryError
        raise MemoryError(f"cannot allocate {dtype}{list(shape)}: {error}") from None
    return np.frombuffer(pages, dtype).reshape(shape)


@functools.cache
def _single(device: jax.Device, memory_kind: str | None) -> jax.sharding.SingleDeviceSharding:
    return jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind)
