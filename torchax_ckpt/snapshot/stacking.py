"""Stacks and copies leaves on devices as a storage plan says, and predicts the memory for it."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from torchax_ckpt.devices.bitcast import from_bits, is_small_float, to_bits
from torchax_ckpt.devices.device_programs import (
    MAX_ARGUMENTS,
    Program,
    Runner,
    copy_program,
    device_program,
    in_chunks,
    run_by_sharding,
)
from torchax_ckpt.devices.device_sizes import Needed, needed_by
from torchax_ckpt.devices.host_array import HostArray
from torchax_ckpt.devices.sharding import LateParts, sharding_of_stack, shards_of
from torchax_ckpt.layout.storage_plan import Plan

Array = jax.Array | np.ndarray
MaybeAbstract = Array | jax.ShapeDtypeStruct
"""An abstract array with a sharding may stand for an array on devices."""


def execute(
    plan: Plan,
    leaves: Mapping[str, Any],
    *,
    copy: bool,
    on_host: bool = False,
    run: Runner = Program.__call__,
) -> dict[str, Any]:
    """Stacks leaves as the plan says, and perhaps copies the others; returns what to store.

    With ``on_host``, stacks of device arrays are made on the host later.
    """
    members = {member for group in plan.stacks.values() for member in group}
    alone = {n: a for n, a in leaves.items() if n not in members and n not in plan.empty}
    stored = _copies(alone, run) if copy else alone
    for name, group in plan.stacks.items():
        if group[0] in leaves:
            arrays = [leaves[member] for member in group]
            first = arrays[0]
            if on_host and isinstance(first, jax.Array):
                shape, target = (len(arrays), *first.shape), stacked_sharding(first.sharding)
                stored[name] = HostArray(shape, first.dtype, target, LateParts.of(arrays))
            else:
                stored[name] = _stack(arrays, run)
    return stored


def await_on_cpus(arrays: Sequence[Any]) -> None:
    """Waits for the arrays if they lie on several CPU devices.

    On CPU devices, a small program runs in a thread of XLA that blocks until its inputs are ready.
    If these are the outputs of a step in flight, the collectives of the step may lack the threads
    that wait for them, and both wait for ever.
    """
    first = next((array for array in arrays if isinstance(array, jax.Array)), None)
    if first is not None and next(iter(first.devices())).platform == "cpu":
        on_devices = [array for array in arrays if isinstance(array, jax.Array)]
        jax.block_until_ready([a for a in on_devices if len(a.sharding.device_set) > 1])


def needed_to_execute(plan: Plan, leaves: Mapping[str, MaybeAbstract], *, copy: bool) -> Needed:
    """Returns the memory of devices that ``execute`` takes; the leaves may be abstract."""
    on_devices = {n: array for n, array in leaves.items() if not isinstance(array, np.ndarray)}
    return needed_by(lambda run: execute(plan, on_devices, copy=copy, run=run))


def stacked_sharding(sharding: Sharding) -> Sharding:
    """Returns the sharding of a stack that the plan has, of leaves with this sharding."""
    target = sharding_of_stack(sharding)
    assert target is not None, "planned as a stack"
    return target


def _stack(arrays: list[Any], run: Runner) -> Any:
    first = arrays[0]
    if isinstance(first, np.ndarray):
        return np.stack(arrays)
    target = stacked_sharding(first.sharding)
    if not first.sharding.is_fully_addressable:
        rows = zip(*(parts_of(array) for array in arrays), strict=True)
        shape = (len(arrays), *first.shape)
        return _assembled(shape, target, [_stack([*row], run) for row in rows])
    parts = [run(stack_program(target), *chunk) for chunk in in_chunks(arrays, MAX_ARGUMENTS)]
    return parts[0] if len(parts) == 1 else run(concatenate_program(target), *parts)


def _copies(leaves: Mapping[str, Any], run: Runner) -> dict[str, Any]:
    arrays = {name: array for name, array in leaves.items() if not isinstance(array, np.ndarray)}
    parts = {(n, i): part for n, array in arrays.items() for i, part in enumerate(parts_of(array))}
    by_name: dict[str, list[Any]] = collections.defaultdict(list)
    copies = run_by_sharding(copy_program, parts, run)
    for name, index in parts:
        by_name[name].append(copies[name, index])
    copied = {n: _assembled(a.shape, a.sharding, by_name[n]) for n, a in arrays.items()}
    return {**leaves, **copied}


def parts_of(array: Any) -> list[Any]:
    """Returns the array itself, or this process's shards if the array spans processes.

    A program on a shard runs on this process alone, so any thread may start it at any time.
    """
    sharding = array.sharding
    if sharding.is_fully_addressable:
        return [array]
    if isinstance(array, jax.Array):
        return [shard.data for shard in shards_of(array)]
    shape, kind = sharding.shard_shape(array.shape), sharding.memory_kind
    return [
        jax.ShapeDtypeStruct(
            shape, array.dtype, sharding=SingleDeviceSharding(device, memory_kind=kind)
        )
        for device in sharding.addressable_devices
    ]


def _assembled(shape: tuple[int, ...], sharding: Sharding, parts: list[Any]) -> Any:
    """Joins parts, as ``parts_of`` returns them, to an array of the given shape and sharding."""
    if sharding.is_fully_addressable:
        return parts[0]
    if not parts or isinstance(parts[0], jax.Array):
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)
    return jax.ShapeDtypeStruct(shape, parts[0].dtype, sharding=sharding)


@device_program(maxsize=256)
def stack_program(sharding: Sharding) -> Any:
    """Returns the program that stacks arrays along a new first dim; the stack has this sharding."""

    def checkpoint_stack(*arrays: jax.Array) -> jax.Array:
        return _by_bits(jnp.stack, arrays)

    return jax.jit(checkpoint_stack, out_shardings=sharding)


@device_program(maxsize=256)
def concatenate_program(sharding: Sharding) -> Any:
    """Returns the program that joins stacks along the first dim; the result has this sharding."""

    def checkpoint_concatenate(*arrays: jax.Array) -> jax.Array:
        return _by_bits(jnp.concatenate, arrays)

    return jax.jit(checkpoint_concatenate, out_shardings=sharding)


def _by_bits(join: Callable[..., jax.Array], arrays: Sequence[jax.Array]) -> jax.Array:
    """Joins arrays with ``join``; small floats as bits, because XLA could change those of NaNs."""
    dtype = arrays[0].dtype
    if not is_small_float(dtype):
        return join(arrays)
    return from_bits(join([to_bits(array) for array in arrays]), dtype)
