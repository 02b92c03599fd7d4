"""Moves leaves to the memory of the host while training continues, for a state that fills devices.

A program copies the leaves into memory of the kind ``pinned_host``. JAX enqueues it before any
later computation, so a later step may donate the leaves, and the training thread waits for nothing.
The thread of the save copies the values to ordinary memory of the host, where stacks are made (on
the devices they would take memory), and deletes the arrays in pinned memory one by one, because it
is scarce and a runtime may keep what it has once allocated.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from torchax_ckpt.devices.device_memory import DeviceMemory, is_exhausted
from torchax_ckpt.devices.device_programs import (
    Program,
    Runner,
    device_program,
    run_by_sharding,
    zeros_on,
)
from torchax_ckpt.devices.device_sizes import Needed, needed_by
from torchax_ckpt.devices.host_array import HostArray, Memory, Offset, aligned, offset_of
from torchax_ckpt.devices.sharding import replicas, sharding_of_stack, shards_of
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.snapshot.stacking import MaybeAbstract, parts_of

logger = logging.getLogger(__name__)

PINNED = "pinned_host"
"""JAX's name of the memory of the host that a device can write to by itself."""

# Leaves with larger shards are offloaded from one replica only. For smaller leaves, selecting the
# shards of one replica would block the training thread for longer than their transfer takes.
_MIN_BYTES_TO_SELECT = 1 << 20


def is_supported(arrays: Iterable[MaybeAbstract]) -> bool:
    """Returns whether the devices of all arrays can copy to pinned memory."""
    on_devices = [array for array in arrays if not isinstance(array, np.ndarray)]
    shardings: set[Any] = {array.sharding for array in on_devices}
    devices = {device for sharding in shardings for device in sharding.addressable_devices}
    if not all(PINNED in {m.kind for m in d.addressable_memories()} for d in devices):
        return False
    # A device of a topology, which abstract arrays may have, compiles programs and runs none.
    ours: set[Any] = {a.sharding for a in on_devices if isinstance(a, jax.Array)}
    held = {device for sharding in ours for device in sharding.addressable_devices}
    one_of_each = {(d.platform, d.device_kind): d for d in held}
    return all(_can_offload(platform, device) for (platform, _), device in one_of_each.items())


@functools.cache
def _can_offload(platform: str, device: jax.Device) -> bool:
    """Returns whether a device can run the program; tried once, because no query tells.

    The CPU devices of jaxlib before 0.8 have pinned memory, to which their programs cannot write.
    """
    try:
        (copy,) = offload_program(SingleDeviceSharding(device))(zeros_on((1,), np.float32, device))
        np.asarray(copy)
    except jax.errors.JaxRuntimeError as error:
        if is_exhausted(error):
            return True
        reason = str(error).partition("\n")[0]
        logger.warning("%s devices cannot copy to the host by themselves: %s", platform, reason)
        return False
    return True


def needed_to_offload(leaves: Mapping[str, Any]) -> Needed:
    """Returns the memory that an offload of leaves, perhaps abstract, takes."""
    ordinary_bytes = sum(len(_offsets(array)) * _shard_bytes(array) for array in leaves.values())
    return needed_by(lambda run: pinned(leaves, run), ordinary_bytes)


def _shard_bytes(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * int(leaf.dtype.itemsize)


def _offsets(leaf: Any) -> set[Offset]:
    """Returns where the shards of this process's devices begin."""
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    return set(map(offset_of, indices.values()))


class Offloaded:
    """Leaves that are on their way from devices to ordinary memory of the host.

    ``plan`` says which of them are stacked there. The memory that they need, as
    ``needed_to_offload`` returns it, counts as used in ``memory`` from the beginning. Raises
    JaxRuntimeError if the devices lack memory.
    """

    def __init__(
        self, plan: Plan, leaves: Mapping[str, jax.Array], memory: DeviceMemory, needed: Needed
    ) -> None:
        self._stacks = {n: group for n, group in plan.stacks.items() if group[0] in leaves}
        self._forms = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            for name, array in leaves.items()
        }
        self._memory = memory
        self._lock = threading.Lock()
        self._fetched: concurrent.futures.Future[dict[str, HostArray]] | None = None
        memory.begin_offload(needed)
        # Runs once: when the memory is allocated, or if the save fails before that.
        self._end = weakref.finalize(self, memory.end_offload, needed)
        self._end.atexit = False
        try:
            self._pinned = pinned(leaves)
        except BaseException:
            self._end()
            raise

    def fetched(self) -> Mapping[str, HostArray]:
        """Waits for the leaves; returns the name of each leaf and stack -> its array on the host.

        Members of a stack are views of it. The threads of several saves may call; the first copies.
        """
        with self._lock:
            is_first = self._fetched is None
            future = self._fetched = self._fetched or concurrent.futures.Future()
        if is_first:
            try:
                future.set_result(self._fetch())
            except BaseException as error:
                if is_exhausted(error):
                    self._memory.may_offload = False
                future.set_exception(error)
            finally:
                self._end()
        return future.result()

    def _fetch(self) -> dict[str, HostArray]:
        members = Plan(self._stacks, frozenset()).members(list(self._forms))
        forms = {n: self._forms[group[0]] for n, group in members.items()}
        # One mapping for all, because a process can have only some 65,000 mappings.
        memory = Memory(
            sum(
                len(_offsets(form)) * aligned(len(members[name]) * _shard_bytes(form))
                for name, form in forms.items()
            )
        )
        arrays: dict[str, HostArray] = {}
        for stored, group in members.items():
            form: Any = forms[stored]
            shape = (len(group), *form.sharding.shard_shape(form.shape))
            buffers = {offset: memory.array(shape, form.dtype) for offset in _offsets(form)}
            for row, name in enumerate(group):
                arrays[name] = self._copied(name, {at: b[row, ...] for at, b in buffers.items()})
            if stored in self._stacks:
                target = sharding_of_stack(form.sharding)
                assert target is not None, "planned as a stack"
                parts = {(0, *offset): buffer for offset, buffer in buffers.items()}
                arrays[stored] = HostArray((len(group), *form.shape), form.dtype, target, parts)
        return arrays

    def _copied(self, name: str, parts: dict[Offset, np.ndarray]) -> HostArray:
        """Copies a leaf to its parts, and deletes its arrays in pinned memory."""
        missing = set(parts)
        for first, array in self._pinned.pop(name):
            for shard in shards_of(array):
                offset = offset_of(shard.index) if first is None else first
                if offset in missing:  # else it is another replica
                    missing.remove(offset)
                    parts[offset][...] = np.asarray(shard.data)
            array.delete()
        assert not missing, "all shards of this process were offloaded"
        form: Any = self._forms[name]
        return HostArray(form.shape, form.dtype, form.sharding, parts)


@device_program(maxsize=256)
def offload_program(sharding: Sharding) -> Any:
    """Returns the program that copies arrays with this sharding to pinned memory of the host."""

    def checkpoint_offload(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(map(jnp.copy, arrays))

    return jax.jit(checkpoint_offload, out_shardings=sharding.with_memory_kind(PINNED))


def pinned(
    leaves: Mapping[str, MaybeAbstract], run: Runner = Program.__call__
) -> dict[str, list[tuple[Offset | None, Any]]]:
    """Runs the programs; returns for each leaf its sources, see ``_sources``, in pinned memory."""
    sources = {(n, offset): source for n, a in leaves.items() for offset, source in _sources(a)}
    by_name: dict[str, list[tuple[Offset | None, Any]]] = {name: [] for name in leaves}
    for (name, offset), array in run_by_sharding(offload_program, sources, run).items():
        by_name[name].append((offset, array))
    return by_name


def _sources(array: Any) -> Iterator[tuple[Offset | None, Any]]:
    """Yields the array or its first replica, with None; or its shards and where each begins.

    An array that spans processes yields the shards of this process, each once.
    """
    if array.sharding.is_fully_addressable:
        yield None, _one_replica(array)
        return
    index_of = array.sharding.addressable_devices_indices_map(array.shape)
    seen: set[Offset] = set()
    for part in parts_of(array):
        (device,) = part.sharding.device_set
        offset = offset_of(index_of[device])
        if offset not in seen:
            seen.add(offset)
            yield offset, part


def _one_replica(array: Any) -> Any:
    """Returns the first replica of an array with large shards; any other array itself."""
    first = _replica_to_select(array.sharding, array.shape, array.dtype.itemsize)
    if first is None:
        return array
    if not isinstance(array, jax.Array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=first)
    on_device = {shard.device: shard.data for shard in shards_of(array)}
    shards = [on_device[d] for d in first.addressable_devices_indices_map(array.shape)]
    return jax.make_array_from_single_device_arrays(array.shape, first, shards)


@functools.lru_cache(maxsize=1024)
def _replica_to_select(
    sharding: Sharding, shape: tuple[int, ...], itemsize: int
) -> NamedSharding | None:
    """Returns the sharding of the first replica; None if the shards are small or not replicated."""
    num_bytes = math.prod(sharding.shard_shape(shape)) * itemsize
    if not isinstance(sharding, NamedSharding) or num_bytes < _MIN_BYTES_TO_SELECT:
        return None
    first, *others = replicas(sharding)
    return first if others else None
