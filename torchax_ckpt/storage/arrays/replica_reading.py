"""Chooses the leaves that one replica reads from storage and sends to all other replicas.

With several TPU slices, each slice may hold a replica of the arrays, and would read the same bytes.
With ``single_replica_restore``, only the processes of the first replica read such a leaf;
``snapshot/move_shards.py`` sends it to the others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from torchax_ckpt.snapshot.sharding import Placement, replicas
from torchax_ckpt.storage.arrays.placement import Wanted

# Each process itself reads leaves of these dtypes and of complex dtypes, because they are rare.
_NIBBLES = {"int4", "uint4", "float4_e2m1fn"}


def split(
    wanted: Mapping[str, Wanted],
) -> tuple[dict[str, Wanted], dict[str, jax.ShapeDtypeStruct]]:
    """Returns the arrays that this process reads, and the leaves that the first replica sends.

    The second result is the same on all processes.
    """
    read_here: dict[str, Wanted] = {}
    spread: dict[str, jax.ShapeDtypeStruct] = {}
    for name, want in wanted.items():
        placements: dict[str, Placement] = {}
        shape = want.shape[1:] if want.members else want.shape
        for leaf, placement in want.placements.items():
            source = _source(placement, want.dtype)
            if source is None:
                placements[leaf] = placement
                continue
            spread[leaf] = jax.ShapeDtypeStruct(shape, np.dtype(want.dtype), sharding=placement)
            if source.addressable_devices:
                placements[leaf] = source
        if placements:
            read_here[name] = dataclasses.replace(want, placements=placements)
    return read_here, spread


def _source(placement: Placement, dtype: str) -> NamedSharding | None:
    """Returns the first replica's sharding of a leaf; None if every process reads its own part."""
    if not isinstance(placement, NamedSharding) or placement.is_fully_addressable:
        return None
    if dtype in _NIBBLES or np.dtype(dtype).kind == "c":
        return None
    if not isinstance(placement.mesh, Mesh):
        return None
    source, is_everywhere = _first_replica(placement)
    return None if is_everywhere else source


@functools.lru_cache(maxsize=1024)
def _first_replica(final: NamedSharding) -> tuple[NamedSharding, bool]:
    """Returns the first replica's sharding, and whether that replica spans all processes."""
    source = replicas(final)[0]
    return source, _processes(source) == _processes(final)


def _processes(sharding: Sharding) -> set[int]:
    devices: set[jax.Device] = sharding.device_set
    return {device.process_index for device in devices}
