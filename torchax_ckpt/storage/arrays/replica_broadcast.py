"""Owns restoring by one replica: it reads, and the others receive it over the device network.

With data-parallel replicas over slices, every slice would read the same bytes from storage. Instead
the devices of the first replica get theirs from storage, and all others from them, in one sum over
replicas of the bits, to which the others add zeros. These are collectives: every process takes
part, on the thread that trains.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torchax_ckpt.snapshot.bitcast import sums, to_bits
from torchax_ckpt.snapshot.sharding import Placement, shards_of
from torchax_ckpt.storage.arrays.placement import Wanted

_REPLICA = "__replica__"
# Leaves in one computation: more of them wait for each other less, and need more memory at once.
_TOGETHER_BYTES = 256 << 20
# Narrower than the octet that they take on the host.
_NIBBLES = {"int4", "uint4", "float4_e2m1fn"}


@dataclasses.dataclass(frozen=True)
class Spread:
    """How a leaf with several replicas comes to its devices.

    Attributes:
      final: where it goes.
      source: the same on the devices of the first replica.
      all: with a leading axis of replicas, one on each.
      summed: as ``final``, with the devices in the order of ``all``, which a computation asks for.
      shape: of the leaf.
      dtype: numpy's or ml_dtypes' name.
    """

    final: NamedSharding
    source: NamedSharding
    all: NamedSharding
    summed: NamedSharding
    shape: tuple[int, ...]
    dtype: str


def split(wanted: Mapping[str, Wanted]) -> tuple[dict[str, Wanted], dict[str, Spread]]:
    """What this process reads, and the leaves that come from the first replica, the same on all."""
    mine: dict[str, Wanted] = {}
    spread: dict[str, Spread] = {}
    for name, want in wanted.items():
        placements: dict[str, Placement] = {}
        shape = want.shape[1:] if want.members else want.shape
        for leaf, placement in want.placements.items():
            way = _way(placement, shape, want.dtype)
            if way is None:
                placements[leaf] = placement
                continue
            spread[leaf] = way
            if way.source.addressable_devices:
                placements[leaf] = way.source
        if placements:
            mine[name] = dataclasses.replace(want, placements=placements)
    return mine, spread


def _way(placement: Placement, shape: tuple[int, ...], dtype: str) -> Spread | None:
    """How a leaf is spread; None where each process reads what it needs."""
    if not isinstance(placement, NamedSharding) or placement.is_fully_addressable:
        return None
    if dtype in _NIBBLES or np.dtype(dtype).kind == "c":
        return None
    if not isinstance(placement.mesh, Mesh) or _is_everywhere(_ways(placement)[0], placement):
        return None
    return Spread(placement, *_ways(placement), shape, dtype)


@functools.lru_cache(maxsize=1024)
def _is_everywhere(source: NamedSharding, final: NamedSharding) -> bool:
    """Whether every process has a part of the first replica."""
    first, every = (_hosts(sharding.device_set) for sharding in (source, final))
    return first == every


def _hosts(devices: Iterable[Any]) -> set[int]:
    return {device.process_index for device in devices}


@functools.lru_cache(maxsize=1024)
def _ways(final: NamedSharding) -> tuple[NamedSharding, NamedSharding, NamedSharding]:
    """Source, all and summed of a Spread."""
    mesh, spec, memory = final.mesh, final.spec, final.memory_kind
    used = {axis for dim in spec for axis in (dim if isinstance(dim, tuple) else (dim,))}
    over = [i for i, axis in enumerate(mesh.axis_names) if axis not in used]
    kept = [i for i in range(len(mesh.axis_names)) if i not in over]
    shape = [mesh.devices.shape[i] for i in kept]
    axes = tuple(mesh.axis_names[i] for i in kept)
    by_replica = mesh.devices.transpose(over + kept).reshape(-1, *shape)
    first = by_replica[:1].reshape(shape or 1)
    source = NamedSharding(Mesh(first, axes or (_REPLICA,)), spec, memory_kind=memory)
    everywhere = Mesh(by_replica, (_REPLICA, *axes))
    return (
        source,
        NamedSharding(everywhere, PartitionSpec(_REPLICA, *spec)),
        NamedSharding(everywhere, spec, memory_kind=memory),
    )


def broadcast(leaves: dict[str, Any], spread: Mapping[str, Spread]) -> None:
    """Puts the leaves of the first replica on all; every process calls it, with the same leaves.

    Args:
      leaves: name -> array, where this process has a part of the first replica; takes the results.
      spread: of which leaves.
    """
    part: list[str] = []
    size = 0
    for name, way in spread.items():
        nbytes = int(np.prod(way.final.shard_shape(way.shape))) * np.dtype(way.dtype).itemsize
        if part and size + nbytes > _TOGETHER_BYTES:
            _broadcast(leaves, {n: spread[n] for n in part})
            part, size = [], 0
        part.append(name)
        size += nbytes
    if part:
        _broadcast(leaves, {n: spread[n] for n in part})


def _broadcast(leaves: dict[str, Any], spread: Mapping[str, Spread]) -> None:
    by_summed: dict[NamedSharding, list[str]] = collections.defaultdict(list)
    for name, way in spread.items():
        by_summed[way.summed].append(name)
    for onto, names in by_summed.items():
        given = [_with_zeros(leaves.get(name), spread[name]) for name in names]
        dtypes = tuple(spread[name].dtype for name in names)
        for name, summed in zip(names, _sum_onto(onto, dtypes)(*given), strict=True):
            leaves[name] = _placed(summed, spread[name].final)


def _placed(summed: jax.Array, final: NamedSharding) -> jax.Array:
    """The same shards, on the mesh that was asked for."""
    shards = [shard.data for shard in shards_of(summed)]
    return jax.make_array_from_single_device_arrays(summed.shape, final, shards)


def _with_zeros(source: jax.Array | None, way: Spread) -> jax.Array:
    """The bits of the leaf with a leading axis of replicas: the first, and zeros for the others."""
    shape = (way.all.mesh.devices.shape[0], *way.shape)
    own = {} if source is None else {s.device: s.data for s in shards_of(source)}
    zeros = (1, *way.final.shard_shape(way.shape))
    bits = jax.eval_shape(to_bits, jax.ShapeDtypeStruct((), np.dtype(way.dtype))).dtype
    parts = [
        to_bits(own[device])[None] if device in own else jnp.zeros(zeros, bits, device=device)
        for device in way.all.addressable_devices_indices_map(shape)
    ]
    return jax.make_array_from_single_device_arrays(shape, way.all, parts)


@functools.lru_cache(maxsize=256)
def _sum_onto(
    summed: NamedSharding, dtypes: tuple[str, ...]
) -> Callable[..., tuple[jax.Array, ...]]:
    return jax.jit(lambda *stacks: sums(stacks, dtypes), out_shardings=summed)
