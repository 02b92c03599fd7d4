"""Reads tensors of files onto devices: several readers, each tensor in as few pieces as possible.

On CPU devices JAX takes over the memory that a tensor was read into, so each byte is copied once.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from torchax_ckpt.devices.move_shards import put
from torchax_ckpt.errors import MismatchError
from torchax_ckpt.formats.tensor_files import NARROWED, FileTensor, TensorFiles
from torchax_ckpt.formats.weights import MODEL
from torchax_ckpt.layout import names
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.state.component import LeafRead
from torchax_ckpt.state.leaf import Spec
from torchax_ckpt.state.stored_entries import StoredModule
from torchax_ckpt.storage.arrays.assembly import (
    Bounds,
    Index,
    Piece,
    SingleLeaf,
    Wanted,
    bounds_of,
    empty,
)
from torchax_ckpt.storage.arrays.onto_devices import BytesInFlight

_MAX_TRANSIT_BYTES = 1 << 30
# A tensor is read as a whole up to this size, so that reading and moving overlap for larger ones.
_MAX_WHOLE_BYTES = 256 << 20
_MAX_READERS = 8


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A region of a tensor, which a reader's thread reads in the devices' dtype."""

    nbytes: int  # on the host, until the arrays of ``arrived`` are on devices
    read: Callable[[], Any]
    arrived: Callable[[Any], list[jax.Array]]  # takes the result; returns the arrays that move

    def finish(self, reading: concurrent.futures.Future[Any]) -> tuple[int, list[jax.Array]]:
        """Waits until the piece is read; returns its bytes and the arrays that move."""
        return self.nbytes, self.arrived(reading.result())


class FileWeights:
    """Weights in files, which are read like the leaves of a step."""

    def __init__(self, files: TensorFiles, options: CheckpointOptions) -> None:
        self._ties, self._options = files.ties, options
        self._fqns = list(files.tensors)
        self._tensors = {names.join((MODEL, n)): t for n, t in files.tensors.items()}

    def module(self, converts: Callable[[str, str], bool]) -> StoredModule:
        """Returns the tensors and ties; integers of 64 bits may become those of 32 bits."""
        nodes = [Spec("torchax", t.dtype, t.shape).node(n) for n, t in self._tensors.items()]
        return StoredModule(
            dict(zip(self._fqns, nodes, strict=True)),
            self._ties,
            are_ties_known=False,
            converts=lambda a, b: b == NARROWED.get(a) or converts(a, b),
        )

    def require_plausible(self, reads: Mapping[str, LeafRead]) -> None:
        """Does nothing: every size was already compared with the model's."""

    def is_whole(self, reads: Mapping[str, LeafRead], num_processes: int) -> bool:
        """Returns False, because files have no digests."""
        return False

    def read_leaves(self, reads: Mapping[str, LeafRead]) -> dict[str, Any]:
        """Reads this process's parts; at most ``max_host_bytes``, or one part, are on the host."""
        leaves: dict[str, Any] = {}
        empty_leaves: dict[str, Any] = {}
        max_bytes = self._options.max_host_bytes or _MAX_TRANSIT_BYTES
        in_flight = BytesInFlight(max_bytes)
        num_readers = min(_MAX_READERS, os.cpu_count() or 1)
        readers = concurrent.futures.ThreadPoolExecutor(num_readers, "torchax_ckpt-read")
        try:
            for name, read in reads.items():
                if math.prod(read.spec.shape) == 0:
                    dtype = np.dtype(read.dtype or read.spec.dtype)
                    empty_leaves[name] = np.zeros(read.spec.shape, dtype)
                    continue
                for piece in _pieces(name, self._tensors[name], read, leaves, max_bytes):
                    in_flight.make_room(piece.nbytes)
                    reading = readers.submit(piece.read)
                    in_flight.add(0, piece.nbytes, functools.partial(piece.finish, reading))
            in_flight.drain()
        finally:
            readers.shutdown(cancel_futures=True)
        return {
            **leaves,
            **put(empty_leaves, {name: reads[name].placement for name in empty_leaves}),
        }


def _pieces(
    name: str, tensor: FileTensor, read: LeafRead, leaves: dict[str, Any], max_bytes: int
) -> Iterator[_Piece]:
    """Yields the pieces of a tensor; after the last has arrived, the tensor is in ``leaves``."""
    shape, dtype, placement = read.spec.shape, read.dtype or read.spec.dtype, read.placement
    # A tensor that is converted is in memory in both dtypes.
    item_bytes = sum(d.itemsize for d in {np.dtype(d) for d in (tensor.dtype, dtype)})

    as_wanted = functools.partial(_as_dtype, dtype=dtype, name=name)
    if isinstance(placement, Sharding):
        indices = placement.addressable_devices_indices_map(shape).values()
        parts = list({bounds_of(index, shape): None for index in indices})
        nbytes = item_bytes * sum(math.prod(b - a for a, b in bounds) for bounds in parts)
        band = _band_of(parts, shape)
        if nbytes <= min(max_bytes, _MAX_WHOLE_BYTES) and (band or tensor.is_one_part):

            def read_parts() -> dict[Bounds, np.ndarray]:
                if band is None:
                    mapped = tensor.mapped()
                    return {part: as_wanted(_copied(mapped[_index(part)])) for part in parts}
                host = as_wanted(tensor.read(_index(band)))
                start = [a for a, _ in band]
                return {part: host[_index(part, start)] for part in parts}

            def all_arrived(read: dict[Bounds, np.ndarray]) -> list[jax.Array]:
                leaves[name] = jax.make_array_from_callback(
                    shape, placement, lambda index: read[bounds_of(index, shape)], np.dtype(dtype)
                )
                return [leaves[name]]

            yield _Piece(nbytes, read_parts, all_arrived)
            return

    target = SingleLeaf(name, Wanted(shape, dtype, {name: placement}, None), leaves)
    chunk = placement.shard_shape(shape) if isinstance(placement, Sharding) else shape

    def whole(piece: Piece) -> _Piece:
        return _Piece(
            math.prod(piece.shape) * item_bytes,
            lambda: as_wanted(tensor.read(piece.index)),
            lambda host: target.arrived(piece, host)[1],
        )

    yield from map(whole, target.pieces(chunk))


def _band_of(parts: Sequence[Bounds], shape: tuple[int, ...]) -> Bounds | None:
    """Returns the rows, along the first dim, that parts make up, if they are rows without gaps."""
    if not shape:
        return ()
    whole = tuple((0, n) for n in shape[1:])
    if not parts or any(part[1:] != whole for part in parts):
        return None
    ordered = sorted(part[0] for part in parts)
    start, reached = ordered[0]
    for low, high in ordered:
        if low > reached:
            return None
        reached = max(reached, high)
    return ((start, reached), *whole)


def _index(bounds: Bounds, start: Sequence[int] | None = None) -> Index:
    """Returns the slices of a part in an array that begins at ``start`` of the whole tensor."""
    origin = start or [0] * len(bounds)
    return tuple(slice(a - s, b - s) for (a, b), s in zip(bounds, origin, strict=True))


def _copied(array: np.ndarray) -> np.ndarray:
    """Copies an array into memory that a CPU device takes over without another copy."""
    result = empty(array.shape, array.dtype)
    result[...] = array
    return result


def _as_dtype(array: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """Returns an array in another dtype, in memory that a CPU device takes over without a copy."""
    if array.dtype == np.dtype(dtype):
        return array
    changed = empty(array.shape, np.dtype(dtype))
    np.copyto(changed, array, casting="unsafe")
    if array.dtype.name in NARROWED and not np.array_equal(changed, array):
        problem = (
            f"expected {array.dtype.name} values that fit into {dtype}, found values out of range"
        )
        raise MismatchError(f"{name}: {problem}", mismatched={name: problem})
    return changed
