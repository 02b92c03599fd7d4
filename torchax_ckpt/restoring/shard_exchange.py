"""Owns how parts of arrays go from hosts that have them to hosts that need them.

Over the device network, in collective permutes: a host receives what one other has, each of its
devices from the device at the same place of the other's block of the mesh. Nothing is added up or
gathered, and a host that need not send or receive keeps what it has. Values travel as integers of
their bits, as XLA converts small floats on the way.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from torchax_ckpt.snapshot.bitcast import from_bits, to_bits
from torchax_ckpt.snapshot.sharding import shards_of
from torchax_ckpt.state.component import Read

# Leaves that go in one compiled call.
_CHUNK = 64
_AXES = ("host", "chip")

Rounds = tuple[tuple[tuple[int, int], ...], ...]
"""One permute after the other: pairs of the process that sends and the one that receives."""


def routes(needs: Sequence[str], holds: Sequence[str | None], slices: Sequence[int]) -> Rounds:
    """How every process gets the part that it needs, in few rounds.

    In one round a process sends to one other, and receives from one. What it receives takes the
    place of what it had. A part stays somewhere until all have it: who has got the part that it
    needs receives no more, and sends on.

    Args:
      needs: by process, which part it needs.
      holds: by process, which part it has; None for none.
      slices: by process, in which slice it lies. In each round, who can receive from its own slice
        does: the way from another is longer.

    Raises:
      LookupError: a part that is needed is nowhere.
    """
    if not set(needs) <= set(holds):
        raise LookupError("a part that is needed is nowhere")
    holds, rounds = list(holds), []
    while lacking := [i for i, part in enumerate(needs) if holds[i] != part]:
        free: dict[str | None, list[int]] = collections.defaultdict(list)
        for i, part in enumerate(holds):
            free[part].append(i)
        pairs: list[tuple[int, int]] = []
        for is_near in (True, False):
            for i in lacking:
                senders = [j for j in free[needs[i]] if not is_near or slices[j] == slices[i]]
                if senders and holds[i] != needs[i]:
                    free[needs[i]].remove(senders[0])
                    pairs.append((senders[0], i))
                    holds[i] = needs[i]
        rounds.append(tuple(pairs))
    return tuple(rounds)


def exchange(
    reads: Mapping[str, Read], values: Mapping[str, jax.Array] | None, rounds: Rounds
) -> dict[str, jax.Array]:
    """Sends parts to the hosts that need them. On the training thread of every process.

    Args:
      reads: leaf -> what is needed, on a mesh over all processes.
      values: leaf -> an array of which this host's devices hold the part that it has; None if it
        has none.
      rounds: see ``routes``.

    Returns:
      Leaf -> array, on its placement.

    Raises:
      ValueError: a mesh has more devices of one process than of another, or none of one.
    """
    by_mesh: dict[Mesh, list[str]] = collections.defaultdict(list)
    for name, read in reads.items():
        by_mesh[_by_host(_sharding(read).mesh)].append(name)
    found: dict[str, jax.Array] = {}
    for mesh, names in by_mesh.items():
        for start in range(0, len(names), _CHUNK):
            chunk = names[start : start + _CHUNK]
            given = [_slots(reads[n], None if values is None else values[n], mesh) for n in chunk]
            shardings = [_sharding(reads[name]) for name in chunk]
            pass_on = _passing(
                mesh,
                rounds,
                tuple(reads[name].spec.dtype for name in chunk),
                tuple(sharding.memory_kind for sharding in shardings),
            )
            for name, sharding, slots in zip(chunk, shardings, pass_on(*given), strict=True):
                shape = reads[name].spec.shape
                shards = [s.data.reshape(sharding.shard_shape(shape)) for s in shards_of(slots)]
                found[name] = jax.make_array_from_single_device_arrays(shape, sharding, shards)
    return found


def _sharding(read: Read) -> NamedSharding:
    assert isinstance(read.placement, NamedSharding), "or it would have no part on a host"
    return read.placement


@functools.lru_cache(maxsize=64)
def _by_host(mesh: Mesh) -> Mesh:
    """The devices in one row for each process, each in the order of that process's block."""
    rows: dict[int, list[jax.Device]] = {i: [] for i in range(jax.process_count())}
    for device in mesh.devices.flat:
        rows[device.process_index].append(device)
    if len({len(row) for row in rows.values()}) != 1:
        counts = {process: len(row) for process, row in rows.items()}
        raise ValueError(f"expected a mesh with as many devices of each process, found {counts}")
    return Mesh(np.array(list(rows.values())), _AXES)


def _slots(read: Read, value: jax.Array | None, mesh: Mesh) -> jax.Array:
    """An array with one slot for each device: with the bits of the shard it has, or zeros."""
    shard = _sharding(read).shard_shape(read.spec.shape)
    bits = jax.eval_shape(to_bits, jax.ShapeDtypeStruct(shard, np.dtype(read.spec.dtype)))
    here = {} if value is None else {s.device: s.data for s in shards_of(value)}
    slots = [
        to_bits(here[device])[None, None]
        if device in here
        else jnp.zeros((1, 1, *bits.shape), bits.dtype, device=device)
        for device in mesh.local_devices
    ]
    return jax.make_array_from_single_device_arrays(
        (*mesh.devices.shape, *bits.shape), NamedSharding(mesh, P(*_AXES)), slots
    )


@functools.lru_cache(maxsize=64)
def _passing(
    mesh: Mesh, rounds: Rounds, dtypes: tuple[str, ...], memory_kinds: tuple[str | None, ...]
) -> Callable[..., tuple[jax.Array, ...]]:
    """From slots to slots, of leaves of these dtypes, which come out along the leading dim."""

    def of_device(*slots: jax.Array) -> tuple[jax.Array, ...]:
        passed = []
        for slot, dtype in zip(slots, dtypes, strict=True):
            for pairs in rounds:
                receives = np.zeros(mesh.devices.shape[0], bool)
                receives[[receiver for _, receiver in pairs]] = True
                is_sent = jnp.asarray(receives)[jax.lax.axis_index(_AXES[0])]
                slot = jnp.where(is_sent, jax.lax.ppermute(slot, _AXES[0], pairs), slot)
            passed.append(jnp.atleast_1d(from_bits(slot[0, 0], dtype)))
        return tuple(passed)

    on_all = jax.shard_map(of_device, mesh=mesh, in_specs=P(*_AXES), out_specs=P(_AXES))
    targets = tuple(NamedSharding(mesh, P(_AXES), memory_kind=kind) for kind in memory_kinds)
    return jax.jit(on_all, out_shardings=targets)
