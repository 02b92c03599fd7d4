"""Moves shards between the host, the devices of this process, and devices of other processes.

From the cheapest to the most expensive: ``put`` and ``move`` transfer arrays from the host, or
between devices of this process; ``permute_over_processes`` sends shards from some processes to
others, in collective permutes; ``sum_over_replicas`` sends the shards of one replica to all others,
in one all-reduce; ``reshard`` changes the sharding on one mesh, by collectives that XLA picks.

Permutes reach n replicas only after log2(n) permutes of every byte; an all-reduce sends every byte
less than twice, but leaves all devices with the same shards. Both send whole shards; a change of
sharding can require parts of shards.

The last three are collectives: every process must call them with the same targets, on its training
thread. Programs in which XLA could change values move their bits as integers (``bitcast``).
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from torchax_ckpt.devices.bitcast import from_bits, is_small_float, to_bits
from torchax_ckpt.devices.device_programs import (
    Program,
    device_program,
    reshaped,
    zeros_on,
)
from torchax_ckpt.devices.device_sizes import shard_bytes
from torchax_ckpt.devices.sharding import Local, Placement, auto_axes, replicas, shards_of

Targets = Mapping[str, jax.ShapeDtypeStruct]
"""Leaf -> its shape, its dtype and the NamedSharding that it moves to."""

Rounds = tuple[tuple[tuple[int, int], ...], ...]
"""Successive permutes, each as pairs (sending process, receiving process)."""

# Bounds of the leaves that one program moves: their number, which determines the compile time, and
# their bytes per device, which determine how much memory the program needs.
_CHUNK, _CHUNK_BYTES = 64, 256 << 20

# A grid is a mesh with these axes. Shards move between rows and stay in their column.
_ROW, _COLUMN = "row", "column"
_ON_GRID = PartitionSpec((_ROW, _COLUMN))


# --- transfers ---


def put(arrays: Mapping[str, Any], placements: Mapping[str, Placement]) -> dict[str, Any]:
    """Moves arrays to their placements; returns name -> moved array.

    Host arrays are copied, so that the result does not alias memory that the caller may change.
    """
    result = dict(arrays)
    batched: dict[str, Sharding | None] = {}
    for name, array in arrays.items():
        placement = placements[name]
        if isinstance(placement, Local):
            if placement is Local.DEFAULT_DEVICE:
                batched[name] = None
        elif _crosses_processes(array, placement):
            result[name] = move(array, placement)
        else:
            batched[name] = placement
    if batched:
        sources, targets = [arrays[name] for name in batched], list(batched.values())
        result.update(zip(batched, jax.device_put(sources, targets, may_alias=False), strict=True))
    return result


def move(array: jax.Array | np.ndarray, sharding: Sharding) -> jax.Array:
    """Moves an array to a sharding; copies nothing if the array has this sharding already."""
    if not _crosses_processes(array, sharding):
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index].copy())


def _crosses_processes(array: jax.Array | np.ndarray, sharding: Sharding) -> bool:
    """Returns whether this process has the whole array and the sharding spans several processes.

    ``jax.device_put`` would first compare the values of all processes on the devices.
    """
    is_here = not isinstance(array, jax.Array) or array.is_fully_addressable
    return is_here and not sharding.is_fully_addressable


# --- whole shards, between the rows of a grid ---


def sum_over_replicas(leaves: MutableMapping[str, Any], targets: Targets) -> None:
    """Sends the shards of each leaf's first replica to all others; ``leaves`` gets the results.

    Before, ``leaves`` has each leaf's array on the first of ``replicas``, but only on processes
    that have devices of this replica.
    """
    grids = {name: replica_grid(_sharding(target)) for name, target in targets.items()}
    _move_on_grids(leaves, targets, grids, sum_program)


def permute_over_processes(
    leaves: MutableMapping[str, Any], targets: Targets, rounds: Rounds
) -> None:
    """Sends shards between processes; ``rounds`` says which process sends to which process.

    The shard on the k-th device of the sending process, in the order of the mesh, goes to the k-th
    device of the receiving process. ``leaves`` has this process's shards, none if it only receives,
    and gets the results. A process that receives nothing keeps its shards.
    """
    grids = {name: process_grid(_sharding(target).mesh) for name, target in targets.items()}
    _move_on_grids(leaves, targets, grids, lambda grid: permute_program(grid, rounds))


@functools.lru_cache(maxsize=1024)
def replica_grid(sharding: NamedSharding) -> Mesh:
    """Returns a grid with one row of devices for each replica."""
    rows = [replica.mesh.devices.ravel() for replica in replicas(sharding)]
    return Mesh(np.array(rows), (_ROW, _COLUMN))


@functools.lru_cache(maxsize=64)
def process_grid(mesh: Mesh) -> Mesh:
    """Returns a grid with a row of devices, in mesh order, for each process."""
    rows: dict[int, list[jax.Device]] = {i: [] for i in range(jax.process_count())}
    for device in mesh.devices.flat:
        rows[device.process_index].append(device)
    if len({len(row) for row in rows.values()}) != 1:
        counts = {process: len(row) for process, row in rows.items()}
        raise ValueError(
            "local tier: expected a mesh in which all processes have equally many devices, found "
            f"these numbers of devices by process: {counts}. Use a mesh with equally many devices "
            "of each process, or the durable tier (tier='durable')"
        )
    return Mesh(np.array(list(rows.values())), (_ROW, _COLUMN))


def slots(target: jax.ShapeDtypeStruct, grid: Mesh) -> jax.ShapeDtypeStruct:
    """Returns the abstract array, of shape [devices * d0, d1, ...], of shards [d0, d1, ...]."""
    first, *rest = _sharding(target).shard_shape(target.shape) or (1,)
    shape = (grid.size * first, *rest)
    return jax.ShapeDtypeStruct(shape, target.dtype, sharding=NamedSharding(grid, _ON_GRID))


@device_program(maxsize=256)
def sum_program(grid: Mesh) -> Any:
    """Returns the program that sends one row's shards to all rows; the others must hold zeros."""
    return _grid_program(grid, lambda bits: jax.lax.psum(bits, _ROW))


@device_program(maxsize=64)
def permute_program(grid: Mesh, rounds: Rounds) -> Any:
    """Returns the program that sends shards between a grid's rows by the permutes in ``rounds``."""

    def permute(bits: jax.Array) -> jax.Array:
        for pairs in rounds:
            receives = np.zeros(grid.devices.shape[0], bool)
            receives[[receiver for _, receiver in pairs]] = True
            is_sent = jnp.asarray(receives)[jax.lax.axis_index(_ROW)]
            bits = jnp.where(is_sent, jax.lax.ppermute(bits, _ROW, pairs), bits)
        return bits

    return _grid_program(grid, permute)


def _grid_program(grid: Mesh, move_bits: Callable[[jax.Array], jax.Array]) -> Any:
    """Returns a jitted program that applies ``move_bits`` to the bits of each device's shards."""

    def checkpoint_move(*slots: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(from_bits(move_bits(to_bits(slot)), slot.dtype) for slot in slots)

    return jax.jit(jax.shard_map(checkpoint_move, mesh=grid, in_specs=_ON_GRID, out_specs=_ON_GRID))


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
            zeros = functools.cache(zeros_on)  # leaves of one shape and dtype share their zeros
            given = [_filled(slots(chunk[n], grid), leaves.get(n), zeros) for n in chunk]
            moved = program_on(grid)(*given)
            for (name, target), array in zip(chunk.items(), moved, strict=True):
                leaves[name] = _leaf(array, target)


def _filled(
    slots: jax.ShapeDtypeStruct, array: jax.Array | None, zeros: Callable[..., jax.Array]
) -> jax.Array:
    """Returns an array with a leaf's shards on the devices that have them, and zeros on others."""
    shape = slots.sharding.shard_shape(slots.shape)
    here = {} if array is None else _in_device_memory(array)
    parts = [
        reshaped(here[device], shape) if device in here else zeros(shape, slots.dtype, device)
        for device in slots.sharding.addressable_devices_indices_map(slots.shape)
    ]
    return jax.make_array_from_single_device_arrays(slots.shape, slots.sharding, parts)


# --- parts of shards, between shardings of one mesh ---


def reshard(leaves: MutableMapping[str, Any], targets: Targets) -> None:
    """Changes each leaf's sharding to its target's, on its mesh; ``leaves`` gets the results."""
    # A program runs on one list of devices, so each order of devices gets a program of its own.
    by_devices: dict[tuple[jax.Device, ...], dict[str, Any]] = collections.defaultdict(dict)
    for name, target in targets.items():
        by_devices[tuple(_sharding(target).mesh.devices.flat)][name] = target
    for chunk in itertools.chain.from_iterable(map(_chunks, by_devices.values())):
        onto = [_sharding(target) for target in chunk.values()]
        given = [_relabelled(leaves[name]) for name in chunk]
        sources: Any = tuple(array.sharding for array in given)
        program = reshard_program(sources, tuple(map(_on_auto_axes, onto)))
        for (name, target), array in zip(chunk.items(), program(*given), strict=True):
            leaves[name] = _leaf(array, target)


@device_program(maxsize=64)
def reshard_program(sources: tuple[NamedSharding, ...], targets: tuple[NamedSharding, ...]) -> Any:
    """Returns the program that changes shardings, on meshes of Auto axes and in device memory."""

    def moved(array: jax.Array, source: NamedSharding, target: NamedSharding) -> jax.Array:
        if not is_small_float(array.dtype):
            return array
        # Without this constraint XLA converts to bits only after the collective.
        bits = jax.lax.with_sharding_constraint(to_bits(array), source)
        bits = jax.lax.with_sharding_constraint(bits, target)
        return from_bits(bits, array.dtype)

    def checkpoint_reshard(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(map(moved, arrays, sources, targets))

    return jax.jit(checkpoint_reshard, out_shardings=targets)


def _relabelled(array: jax.Array) -> jax.Array:
    """Returns the array on a mesh with Auto axes, which ``with_sharding_constraint`` requires."""
    assert isinstance(array.sharding, NamedSharding), "only NamedShardings are moved"
    shards = list(_in_device_memory(array).values())
    sharding = _on_auto_axes(array.sharding)
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def _on_auto_axes(sharding: NamedSharding) -> NamedSharding:
    assert isinstance(sharding.mesh, Mesh), "expected the mesh of an array"
    return NamedSharding(auto_axes(sharding.mesh), sharding.spec)


# --- shared by all programs ---


def _sharding(target: jax.ShapeDtypeStruct) -> NamedSharding:
    assert isinstance(target.sharding, NamedSharding), "only NamedShardings are moved"
    return target.sharding


def _in_device_memory(array: jax.Array) -> dict[jax.Device, jax.Array]:
    """Returns device of this process -> its shard, copied there if it lies in host memory."""
    return {shard.device: _in_memory(shard.data, shard.device, None) for shard in shards_of(array)}


def _leaf(array: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
    """Makes the leaf that ``target`` describes from the shards of an array in device memory."""
    sharding = _sharding(target)
    shape, kind = sharding.shard_shape(target.shape), sharding.memory_kind
    shards = [
        _in_memory(reshaped(shard.data, shape), shard.device, kind) for shard in shards_of(array)
    ]
    return jax.make_array_from_single_device_arrays(target.shape, sharding, shards)


def _in_memory(shard: jax.Array, device: jax.Device, kind: str | None) -> jax.Array:
    """Returns a shard in memory of this kind, or the device's default memory, copied if need be."""
    kind = kind or device.default_memory().kind
    if shard.sharding.memory_kind == kind:
        return shard
    return jax.device_put(shard, SingleDeviceSharding(device, memory_kind=kind))


def _chunks(targets: Targets) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    """Yields leaves in chunks, one per run of a program; all processes get the same chunks."""
    chunk: dict[str, jax.ShapeDtypeStruct] = {}
    size = 0
    sizes = shard_bytes(targets)
    for name, target in targets.items():
        if _moves_alone(target.dtype):
            yield {name: target}
            continue
        if chunk and (len(chunk) == _CHUNK or size + sizes[name] > _CHUNK_BYTES):
            yield chunk
            chunk, size = {}, 0
        chunk[name] = target
        size += sizes[name]
    if chunk:
        yield chunk


def _moves_alone(dtype: np.dtype[Any]) -> bool:
    """Returns whether a leaf needs a program of its own: if ``to_bits`` changes its dtype to uint8.

    For v5p chips, the TPU compiler (libtpu 0.0.42 and 0.0.52) ends the process if a program
    converts one of several arrays to bytes, moves all of them in collectives, and a dim is not a
    multiple of the compiler's tile.
    """
    return dtype.itemsize == 1 and dtype != np.uint8
