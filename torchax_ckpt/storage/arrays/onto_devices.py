"""Reads stored arrays onto devices.

Each process reads only what its devices will hold, extended to whole blocks, and compares the bytes
before they go to a device. ``max_host_bytes``, or a default, limits the host memory of data that
was requested from storage and is not on its devices yet.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from torchax_ckpt.devices.host_array import Placement
from torchax_ckpt.devices.move_shards import sum_over_replicas
from torchax_ckpt.devices.sharding import replicas
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.runtime import progress
from torchax_ckpt.runtime.stages import stage
from torchax_ckpt.storage.arrays import read_arrays
from torchax_ckpt.storage.arrays.assembly import Piece, SingleLeaf, Stack, Target, Wanted
from torchax_ckpt.storage.directory.committed_step import CommittedStep

# The default limit of the bytes in flight between storage and devices, in addition to the largest
# array that the host puts together from pieces. It is enough to keep storage and devices busy.
_IN_FLIGHT_BYTES = 1 << 30
# Each process reads leaves of these dtypes and of complex dtypes itself, because they are rare.
_NIBBLES = {"int4", "uint4", "float4_e2m1fn"}

Finish = Callable[[], tuple[int, list[jax.Array]]]
"""Waits for a piece; returns the bytes and the moving arrays of the parts that it completes."""


@stage("read the arrays")
def read_leaves(
    committed: CommittedStep,
    wanted: Mapping[str, Wanted],
    options: CheckpointOptions,
    agree: Callable[[], None] = lambda: None,
    opened: Mapping[str, ts.TensorStore] = types.MappingProxyType({}),
) -> dict[str, Any]:
    """Returns the wanted leaves by name; calls ``agree`` before devices communicate.

    ``opened`` are the arrays by stored name, if they are open already.
    """
    leaves: dict[str, Any] = {}
    spread: dict[str, jax.ShapeDtypeStruct] = {}
    if options.single_replica_restore:
        wanted, spread = _split_replicas(wanted)
    targets = [
        (Stack if want.members else SingleLeaf)(n, want, leaves) for n, want in wanted.items()
    ]
    _read(committed, targets, options, opened)
    if spread:
        agree()
        sum_over_replicas(leaves, spread)
    return leaves


def _split_replicas(
    wanted: Mapping[str, Wanted],
) -> tuple[dict[str, Wanted], dict[str, jax.ShapeDtypeStruct]]:
    """Returns the arrays that this process reads, and the leaves that the first replica sends.

    With several TPU slices, each may hold a replica of the arrays, and would read the same bytes.
    The second result is the same on all processes.
    """
    to_read: dict[str, Wanted] = {}
    spread: dict[str, jax.ShapeDtypeStruct] = {}
    for name, want in wanted.items():
        placements: dict[str, Placement] = {}
        shape = want.shape[1:] if want.members else want.shape
        for leaf, placement in want.placements.items():
            source = _first_sharding(placement, want.dtype)
            if source is None:
                placements[leaf] = placement
                continue
            spread[leaf] = jax.ShapeDtypeStruct(shape, np.dtype(want.dtype), sharding=placement)
            if source.addressable_devices:
                placements[leaf] = source
        if placements:
            to_read[name] = dataclasses.replace(want, placements=placements)
    return to_read, spread


def _first_sharding(placement: Placement, dtype: str) -> jax.sharding.NamedSharding | None:
    """Returns the first replica's sharding of a leaf; None if every process reads its own part."""
    if (
        not isinstance(placement, jax.sharding.NamedSharding)
        or not isinstance(placement.mesh, jax.sharding.Mesh)
        or placement.is_fully_addressable
        or dtype in _NIBBLES
        or np.dtype(dtype).kind == "c"
    ):
        return None
    return _first_replica(placement)


@functools.lru_cache(maxsize=1024)
def _first_replica(final: jax.sharding.NamedSharding) -> jax.sharding.NamedSharding | None:
    """Returns the first replica's sharding; None if that replica spans all processes."""
    source = replicas(final)[0]
    return None if _processes_of(source) == _processes_of(final) else source


def _processes_of(sharding: jax.sharding.Sharding) -> set[int]:
    devices: set[jax.Device] = sharding.device_set
    return {device.process_index for device in devices}


def _read(
    committed: CommittedStep,
    targets: Sequence[Target],
    options: CheckpointOptions,
    opened: Mapping[str, ts.TensorStore],
) -> None:
    pace = read_arrays.pace_of(options)
    stores = opened or read_arrays.opened(committed, {t.name: t.wanted for t in targets}, pace)
    largest = max((target.nbytes for target in targets), default=0)

    def pieces() -> Iterator[tuple[Target, Piece]]:
        for target in targets:
            for piece in target.pieces(read_arrays.chunk_of(stores[target.name])):
                yield target, piece

    def total_bytes() -> int:
        return sum(piece.nbytes for _, piece in pieces())

    with progress.bar(f"reading step {committed.step}", total_bytes) as on_bytes:
        window = BytesInFlight(options.max_host_bytes or largest + _IN_FLIGHT_BYTES)
        for target, piece in pieces():
            piece_bytes, joined_bytes = target.awaits(piece)
            window.make_room(piece_bytes + joined_bytes)
            arriving = read_arrays.Arrival(
                committed, target, piece, stores[target.name], pace, on_bytes
            )
            window.add(piece_bytes, joined_bytes, arriving.finish)
            del arriving  # else it would stay in memory until the next one
        window.drain()


class BytesInFlight:
    """Limits the bytes in flight between storage and devices; only a single array can exceed it.

    A piece is in flight from its request until it is read; a part that is put together from pieces,
    from its first piece until it is on its devices.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._reading: collections.deque[tuple[int, Finish]] = collections.deque()
        self._moving: collections.deque[tuple[int, list[jax.Array]]] = collections.deque()

    def add(self, piece_bytes: int, joined_bytes: int, finish: Finish) -> None:
        """Adds a piece in flight, with the two numbers of bytes that ``Target.awaits`` returned.

        ``finish`` waits for the piece, and returns what ``Target.arrived`` does.
        """
        self._bytes += piece_bytes + joined_bytes
        self._reading.append((piece_bytes, finish))

    def make_room(self, nbytes: int) -> None:
        """Waits, for the oldest first, until ``nbytes`` more fit or nothing is in flight."""
        while (self._reading or self._moving) and self._bytes + nbytes > self._max_bytes:
            self._finish_oldest()

    def drain(self) -> None:
        """Waits for all pieces that are still being read."""
        while self._reading:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        if self._moving and (len(self._moving) > len(self._reading) or not self._reading):
            nbytes, arrays = self._moving.popleft()
            jax.block_until_ready(arrays)
        else:
            nbytes, finish = self._reading.popleft()
            self._moving.append(finish())
        self._bytes -= nbytes
