"""Moves shards between the host, the devices of this process and those of other processes.

All programs that move shards on devices during a restore are built here; other files decide which
leaves go where. Cheapest first:

    put, move                 Transfers from the host, or between devices of this process; no
                              collectives.
    permute_over_processes    Some processes send their shards to others, in collective permutes.
    sum_over_replicas         One replica sends its shards to all others, in one all-reduce.
    reshard                   Leaves change their sharding on one mesh; XLA picks the collectives.

The last three have a program each, because none can stand in for another:

- Permutes reach n replicas in log2(n) rounds, and each round sends every byte. An all-reduce sends
  less than twice every byte, for any n.
- An all-reduce leaves the same shards on all devices of a group. Hosts that swap their parts need
  different ones, and a host that has its part already should neither send nor receive.
- Both send whole shards to devices that need whole shards. A resharding cuts shards into parts.

Permutes and sums share the rest: shards lie in slots, one for each device of a grid, and one
function builds both programs. All three are collectives: every process calls them with the same
targets, on its training thread. They move one chunk of leaves after the other.

Values travel as integers of their bits where a program would change them: sums lose the sign of
zeros and the bits of NaNs, and XLA converts small floats on the way.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from torchax_ckpt.snapshot.bitcast import from_bits, is_small_float, to_bits
from torchax_ckpt.snapshot.sharding import Local, Placement, auto_axes, shards_of

Targets = Mapping[str, jax.ShapeDtypeStruct]
"""Leaf -> shape, dtype and the sharding where it goes, a NamedSharding."""

Rounds = tuple[tuple[tuple[int, int], ...], ...]
"""One permute after the other: pairs of the process that sends and the one that receives."""

Program = Callable[..., tuple[jax.Array, ...]]

# Leaves of one program: the time to compile grows with their number, and the memory that is needed
# at once with their size on a device.
_CHUNK, _CHUNK_BYTES = 64, 256 << 20

# A grid is a mesh of these axes. Shards move between rows, and stay in their column.
_ROW, _COLUMN = "row", "column"
_ON_GRID = PartitionSpec((_ROW, _COLUMN))


# --- transfers ---


def put(arrays: Mapping[str, Any], placements: Mapping[str, Placement]) -> dict[str, Any]:
    """Moves each array to its placement, in one batched transfer.

    Host arrays are copied, so that the result does not alias memory that the caller may change.
    """
    result = dict(arrays)
    near: dict[str, Sharding | None] = {}
    for name, array in arrays.items():
        placement = placements[name]
        if isinstance(placement, Local):
            if placement is Local.DEFAULT_DEVICE:
                near[name] = None
        elif _leaves_process(array, placement):
            result[name] = move(array, placement)
        else:
            near[name] = placement
    if near:
        sources, targets = [arrays[name] for name in near], list(near.values())
        result.update(zip(near, jax.device_put(sources, targets, may_alias=False), strict=True))
    return result


def move(array: jax.Array | np.ndarray, sharding: Sharding) -> jax.Array:
    """The array on this sharding; one that is there already stays the same."""
    if not _leaves_process(array, sharding):
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index].copy())


def _leaves_process(array: jax.Array | np.ndarray, sharding: Sharding) -> bool:
    """Whether the array, which every process has, goes to devices of several processes.

    ``jax.device_put`` would first compare what the processes have, on the devices.
    """
    is_here = not isinstance(array, jax.Array) or array.is_fully_addressable
    return is_here and not sharding.is_fully_addressable


# --- whole shards, between the rows of a grid ---


def sum_over_replicas(leaves: MutableMapping[str, Any], targets: Targets) -> None:
    """Gives the shards of the first replica to all others.

    Args:
      leaves: leaf -> its array on the first of ``replicas``, on processes that have devices of it.
        Takes the results.
      targets: see above; the shardings have several replicas.
    """
    grids = {name: replica_grid(_sharding(target)) for name, target in targets.items()}
    _move_on_grids(leaves, targets, grids, sum_program)


def permute_over_processes(
    leaves: MutableMapping[str, Any], targets: Targets, rounds: Rounds
) -> None:
    """Sends shards from processes to others, each to the device at the same place there.

    Args:
      leaves: leaf -> an array of the shards that the devices of this process have, or nothing.
        Takes the results.
      targets: see above; the meshes have devices of all processes.
      rounds: which process sends to which. A process that receives nothing keeps its shards.

    Raises:
      ValueError: a mesh has more devices of one process than of another, or none of one.
    """
    grids = {name: process_grid(_sharding(target).mesh) for name, target in targets.items()}
    _move_on_grids(leaves, targets, grids, lambda grid: permute_program(grid, rounds))


@functools.lru_cache(maxsize=1024)
def replicas(sharding: NamedSharding) -> tuple[NamedSharding, ...]:
    """The same shards on the devices of one replica: for each replica, in the mesh's order."""
    mesh, spec = sharding.mesh, sharding.spec
    used = {axis for dim in spec for axis in (dim if isinstance(dim, tuple) else (dim,))}
    over = [i for i, axis in enumerate(mesh.axis_names) if axis not in used]
    kept = [i for i in range(len(mesh.axis_names)) if i not in over]
    shape = [mesh.devices.shape[i] for i in kept]
    axes = tuple(mesh.axis_names[i] for i in kept)
    by_replica = mesh.devices.transpose(over + kept).reshape(-1, *(shape or [1]))
    return tuple(
        NamedSharding(Mesh(devices, axes or (_COLUMN,)), spec, memory_kind=sharding.memory_kind)
        for devices in by_replica
    )


@functools.lru_cache(maxsize=1024)
def replica_grid(sharding: NamedSharding) -> Mesh:
    """One row for each replica."""
    rows = [replica.mesh.devices.ravel() for replica in replicas(sharding)]
    return Mesh(np.array(rows), (_ROW, _COLUMN))


@functools.lru_cache(maxsize=64)
def process_grid(mesh: Mesh) -> Mesh:
    """One row for each process, in the order of that process's block of the mesh."""
    rows: dict[int, list[jax.Device]] = {i: [] for i in range(jax.process_count())}
    for device in mesh.devices.flat:
        rows[device.process_index].append(device)
    if len({len(row) for row in rows.values()}) != 1:
        counts = {process: len(row) for process, row in rows.items()}
        raise ValueError(f"expected a mesh with as many devices of each process, found {counts}")
    return Mesh(np.array(list(rows.values())), (_ROW, _COLUMN))


def slots(target: jax.ShapeDtypeStruct, grid: Mesh) -> jax.ShapeDtypeStruct:
    """The array that a program on a grid takes and gives for a leaf: a shard on every device.

    The shards, [d0, d1, ...], lie one after the other along the first dim: [devices * d0, d1, ...].
    """
    first, *rest = _sharding(target).shard_shape(target.shape) or (1,)
    shape = (grid.size * first, *rest)
    return jax.ShapeDtypeStruct(shape, target.dtype, sharding=NamedSharding(grid, _ON_GRID))


@functools.lru_cache(maxsize=256)
def sum_program(grid: Mesh) -> Program:
    """From slots to slots: the sum over rows, of which all but one are zeros."""
    return _grid_program(grid, lambda bits: jax.lax.psum(bits, _ROW))


@functools.lru_cache(maxsize=64)
def permute_program(grid: Mesh, rounds: Rounds) -> Program:
    """From slots to slots, after these rounds between rows."""

    def permute(bits: jax.Array) -> jax.Array:
        for pairs in rounds:
            receives = np.zeros(grid.devices.shape[0], bool)
            receives[[receiver for _, receiver in pairs]] = True
            is_sent = jnp.asarray(receives)[jax.lax.axis_index(_ROW)]
            bits = jnp.where(is_sent, jax.lax.ppermute(bits, _ROW, pairs), bits)
        return bits

    return _grid_program(grid, permute)


def _grid_program(grid: Mesh, move_bits: Callable[[jax.Array], jax.Array]) -> Program:
    """From slots to slots of any leaves; ``move_bits`` runs on every device, with its slot."""

    def on_device(*slots: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(from_bits(move_bits(to_bits(slot)), slot.dtype) for slot in slots)

    return jax.jit(jax.shard_map(on_device, mesh=grid, in_specs=_ON_GRID, out_specs=_ON_GRID))


def _move_on_grids(
    leaves: MutableMapping[str, Any],
    targets: Targets,
    grids: Mapping[str, Mesh],
    program_on: Callable[[Mesh], Program],
) -> None:
    by_grid: dict[Mesh, dict[str, jax.ShapeDtypeStruct]] = collections.defaultdict(dict)
    for name, target in targets.items():
        by_grid[grids[name]][name] = target
    for grid, on_grid in by_grid.items():
        for chunk in _chunks(on_grid):
            zeros = functools.cache(_zeros)  # leaves of one shape and dtype share them
            given = [_filled(slots(chunk[n], grid), leaves.get(n), zeros) for n in chunk]
            moved = program_on(grid)(*given)
            for (name, target), array in zip(chunk.items(), moved, strict=True):
                leaves[name] = _leaf(array, target)


def _filled(
    slots: jax.ShapeDtypeStruct, array: jax.Array | None, zeros: Callable[..., jax.Array]
) -> jax.Array:
    """Slots with the shards that this process has of a leaf; zeros on its other devices."""
    shape = slots.sharding.shard_shape(slots.shape)
    here = {} if array is None else _in_device_memory(array)
    parts = [
        here[device].reshape(shape) if device in here else zeros(shape, slots.dtype, device)
        for device in slots.sharding.addressable_devices_indices_map(slots.shape)
    ]
    return jax.make_array_from_single_device_arrays(slots.shape, slots.sharding, parts)


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any], device: jax.Device) -> jax.Array:
    """A shard whose bits are zeros: float8_e8m0fnu has no value zero."""
    bits = jax.eval_shape(to_bits, jax.ShapeDtypeStruct(shape, dtype))
    return from_bits(jnp.zeros(bits.shape, bits.dtype, device=device), dtype)


# --- parts of shards, between shardings of one mesh ---


def reshard(leaves: MutableMapping[str, Any], targets: Targets) -> None:
    """Moves leaves to other shardings on their meshes.

    Args:
      leaves: leaf -> array with a NamedSharding. Takes the results.
      targets: see above.
    """
    for chunk in _chunks(targets):
        onto = [_sharding(target) for target in chunk.values()]
        given = [_relabelled(leaves[name]) for name in chunk]
        program = reshard_program(
            tuple(array.sharding for array in given), tuple(map(_on_auto_axes, onto))
        )
        for (name, target), array in zip(chunk.items(), program(*given), strict=True):
            leaves[name] = _leaf(array, target)


@functools.lru_cache(maxsize=64)
def reshard_program(
    sources: tuple[NamedSharding, ...], targets: tuple[NamedSharding, ...]
) -> Program:
    """From arrays on these shardings to the same on those: in device memory, on Auto axes."""

    def moved(array: jax.Array, source: NamedSharding, target: NamedSharding) -> jax.Array:
        if not is_small_float(array.dtype):
            return array
        # XLA would move the conversion to bits behind the collective, if it were not told where
        # the bits lie before.
        bits = jax.lax.with_sharding_constraint(to_bits(array), source)
        bits = jax.lax.with_sharding_constraint(bits, target)
        return from_bits(bits, array.dtype)

    def on_all(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(map(moved, arrays, sources, targets))

    return jax.jit(on_all, out_shardings=targets)


def _relabelled(array: jax.Array) -> jax.Array:
    """The same shards on Auto axes, which ``with_sharding_constraint`` asks for."""
    assert isinstance(array.sharding, NamedSharding), "no other is moved"
    shards = list(_in_device_memory(array).values())
    sharding = _on_auto_axes(array.sharding)
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def _on_auto_axes(sharding: NamedSharding) -> NamedSharding:
    assert isinstance(sharding.mesh, Mesh), "arrays lie on devices"
    return NamedSharding(auto_axes(sharding.mesh), sharding.spec)


# --- for all ---


def _sharding(target: jax.ShapeDtypeStruct) -> NamedSharding:
    assert isinstance(target.sharding, NamedSharding), "no other is moved"
    return target.sharding


def _in_device_memory(array: jax.Array) -> dict[jax.Device, jax.Array]:
    """The shards on devices of this process; of an array in host memory copies on the devices."""
    return {shard.device: _in_memory(shard.data, shard.device, None) for shard in shards_of(array)}


def _leaf(array: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
    """The leaf that has the shards of an array, which are in device memory."""
    sharding = _sharding(target)
    shape, kind = sharding.shard_shape(target.shape), sharding.memory_kind
    shards = [
        _in_memory(shard.data.reshape(shape), shard.device, kind) for shard in shards_of(array)
    ]
    return jax.make_array_from_single_device_arrays(target.shape, sharding, shards)


def _in_memory(shard: jax.Array, device: jax.Device, kind: str | None) -> jax.Array:
    """The shard in this kind of its device's memory, None for the default; copied if need be."""
    kind = kind or device.default_memory().kind
    if shard.sharding.memory_kind == kind:
        return shard
    return jax.device_put(shard, SingleDeviceSharding(device, memory_kind=kind))


def _chunks(targets: Targets) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    """Leaves that one program moves; the same on every process."""
    chunk: dict[str, jax.ShapeDtypeStruct] = {}
    size = 0
    for name, target in targets.items():
        shard = _sharding(target).shard_shape(target.shape)
        num_bytes = math.prod(shard) * target.dtype.itemsize
        if chunk and (len(chunk) == _CHUNK or size + num_bytes > _CHUNK_BYTES):
            yield chunk
            chunk, size = {}, 0
        chunk[name] = target
        size += num_bytes
    if chunk:
        yield chunk
