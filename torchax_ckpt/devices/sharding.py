"""Computes with shardings, and evaluates the user's ``shardings`` rule."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from torchax_ckpt.devices.host_array import HostArray, Local, Offset, Placement, offset_of
from torchax_ckpt.errors import MismatchError
from torchax_ckpt.runtime import jax_versions

_listing_lock = threading.RLock()
_MAX_TRIES = 1000


ShardingRule = Callable[[str, jax.ShapeDtypeStruct], "Sharding | PartitionSpec"]
"""A leaf's name and its shape and dtype -> its sharding; torchax's sharders have this signature."""


def placement_of(array: jax.Array | np.ndarray) -> Placement:
    """Returns the placement of an array, even of a JAX array whose buffer was donated."""
    if not isinstance(array, jax.Array):
        return Local.HOST
    return array.sharding if array.committed else Local.DEFAULT_DEVICE


def replicated_like(placement: Placement) -> Placement:
    """Returns the placement of a scalar, such as a step count, of an array with this placement."""
    if isinstance(placement, NamedSharding):
        return NamedSharding(placement.mesh, PartitionSpec(), memory_kind=placement.memory_kind)
    return placement


def sharding_of_stack(sharding: Sharding) -> Sharding | None:
    """Returns the sharding of a stack of arrays with this sharding; None if they cannot be stacked.

    The leading axis is not sharded, so stacking moves nothing between devices.
    """
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(None, *sharding.spec)
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return sharding if isinstance(sharding, SingleDeviceSharding) else None


@functools.lru_cache(maxsize=1024)
def replicas(sharding: NamedSharding) -> tuple[NamedSharding, ...]:
    """Returns the sharding of each replica, in mesh order; its devices hold the array once."""
    mesh, spec = sharding.mesh, sharding.spec
    used = {axis for dim in spec for axis in (dim if isinstance(dim, tuple) else (dim,))}
    over = [i for i, axis in enumerate(mesh.axis_names) if axis not in used]
    kept = [i for i in range(len(mesh.axis_names)) if i not in over]
    shape = [mesh.devices.shape[i] for i in kept]
    axes = tuple(mesh.axis_names[i] for i in kept)
    by_replica = mesh.devices.transpose(over + kept).reshape(-1, *(shape or [1]))
    return tuple(
        NamedSharding(Mesh(devices, axes or ("device",)), spec, memory_kind=sharding.memory_kind)
        for devices in by_replica
    )


@dataclasses.dataclass(frozen=True)
class HostPart:
    """The part that this host's devices hold of an array that spans several hosts.

    ``sharding`` is over this host's devices only. ``starts`` has, for each of them in mesh order,
    the index in the whole array at which its shard begins.
    """

    sharding: NamedSharding
    shape: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]


def spans_hosts(placement: Placement) -> bool:
    """Returns whether an array with this placement lies on devices of several processes."""
    return isinstance(placement, Sharding) and not placement.is_fully_addressable


def host_part(sharding: Sharding, shape: tuple[int, ...]) -> HostPart:
    """Returns the part that this host's devices, a block of the mesh, hold; else ValueError."""
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            "local tier: expected a NamedSharding for an array that spans several hosts, found "
            f"{sharding}. Give the array a NamedSharding"
        )
    mesh = sharding.mesh.local_mesh
    part = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    per_dim = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    counts = [math.prod(mesh.shape[axis] for axis in _axes([dim])) for dim in per_dim]
    shard = sharding.shard_shape(shape)
    indices = sharding.addressable_devices_indices_map(shape)
    at = [indices[device] or () for device in mesh.devices.flat]
    return HostPart(
        part,
        tuple(length * count for length, count in zip(shard, counts, strict=True)),
        tuple(tuple(dim.start or 0 for dim in index) for index in at),
    )


def shards_of(array: jax.Array) -> Sequence[jax.Shard]:
    """Returns the shards of an array that lie on devices of this process, each exactly once.

    JAX lists the buffers of an array at the first look, without a lock: two threads may see a part
    of the list, or each append to it (jax 0.10.2; not 0.12.0.1). All code that shares an array with
    another thread must use this function. Raises RuntimeError if the list stays incomplete.
    """
    buffers: Any = array
    count = len(array.sharding.addressable_devices)
    with _listing_lock:
        for _ in range(_MAX_TRIES):
            # ``addressable_shards`` would cache an incomplete list. It is called only without a
            # list: for a deleted array, it then raises the error.
            listed = buffers._arrays or [shard.data for shard in array.addressable_shards]
            # Even a list of the right length may lack one shard and have another twice.
            by_device = {data.device: data for data in listed}
            if len(by_device) == count:
                form = array.sharding, array.shape
                return [jax.Shard(device, *form, data) for device, data in by_device.items()]
            time.sleep(0.001)  # another thread is building the list
    raise RuntimeError(
        f"JAX lists {len(by_device)} shards of an array that lies on {count} devices of this "
        "process, because two threads looked at its shards at the same time. Do not look at them "
        "in another thread while a save or restore uses the array."
    )


def shards_as(array: jax.Array, sharding: Sharding, shape: tuple[int, ...]) -> jax.Array:
    """Returns an array of the same buffers, which may be deleted, in another sharding and shape."""
    here = [shard.data for shard in shards_of(array)]
    return jax.make_array_from_single_device_arrays(shape, sharding, here)


def unshared(array: jax.Array) -> jax.Array:
    """Returns a new array object that shares the buffers of the given array.

    JAX caches the values on the host in the array object, so this cache is freed with the new one.
    """
    return shards_as(array, array.sharding, array.shape)


class LateParts(Mapping[Offset, np.ndarray]):
    """A mapping: where a part of a stack begins -> the part, which each look makes on the host."""

    def __init__(self, members: Sequence[jax.Array], devices: Mapping[Offset, jax.Device]) -> None:
        self._members, self._devices = members, devices

    @classmethod
    def of(cls, members: Sequence[jax.Array]) -> LateParts:
        """Returns the parts of a stack of arrays with equal shapes and shardings."""
        index_of = members[0].sharding.addressable_devices_indices_map(members[0].shape)
        return cls(members, {(0, *offset_of(index)): device for device, index in index_of.items()})

    def __getitem__(self, offset: Offset) -> np.ndarray:
        return stack(self.members(offset))

    def __contains__(self, offset: object) -> bool:
        return offset in self._devices

    def __iter__(self) -> Iterator[Offset]:
        return iter(self._devices)

    def __len__(self) -> int:
        return len(self._devices)

    def moved(self, offsets: Mapping[Offset, Offset]) -> LateParts:
        """Returns the same parts at other offsets; ``offsets`` maps each new one to the old one."""
        return LateParts(self._members, {to: self._devices[at] for to, at in offsets.items()})

    def rows(self) -> dict[Offset, np.ndarray]:
        """Returns where the part of each member begins -> the part; stacks nothing."""
        return {
            (number, *offset[1:]): row[np.newaxis]
            for offset in self
            for number, row in enumerate(self.members(offset))
        }

    def members(self, offset: Offset, within: slice = slice(None)) -> list[np.ndarray]:
        """Returns the shards of which a part consists: one of each member ``within`` a range."""
        members, device = self._members[within], self._devices[offset]
        if device.platform == "cpu":
            return _on_cpu(members, device)
        return [*map(np.asarray, [_fetching(member, device) for member in members])]


def stack(rows: Sequence[np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
    """Returns what ``np.stack`` does, in half the time if the arrays are small."""
    first = rows[0]
    if not first.ndim:
        return np.stack(rows, out=out)
    target = None if out is None else out.reshape(len(rows) * len(first), *first.shape[1:])
    return np.concatenate(rows, out=target).reshape(len(rows), *first.shape)


def _on_cpu(arrays: Sequence[jax.Array], device: jax.Device) -> list[np.ndarray]:
    """Returns views of the shards on a CPU device, of arrays with one sharding."""
    first = arrays[0]
    if first.is_fully_replicated:
        shards = [array.addressable_data(0) for array in arrays]
    else:
        index = [*first.sharding.addressable_devices_indices_map(first.shape)].index(device)
        shards = [_shard_on(device, array, index) for array in arrays]
    if jax_versions.itemsize_bits(first.dtype) < 8:  # JAX would keep unpacked copies
        return [np.asarray(unshared(shard)) for shard in shards]
    return [*map(np.asarray, shards)]  # JAX keeps the views, which take no memory


def _shard_on(device: jax.Device, array: jax.Array, index: int) -> jax.Array:
    """Returns the shard on a device, at this index unless another thread disturbed JAX's list."""
    with _listing_lock:
        try:
            shard = array.addressable_data(index)
            if device in shard.sharding.device_set:
                return shard  # faster than all shards
        except IndexError:
            pass
        return next(shard.data for shard in shards_of(array) if shard.device == device)


def _fetching(array: jax.Array, device: jax.Device) -> jax.Array:
    """Returns the shard of an array on a device, after it began to copy the shard to the host."""
    # JAX would keep the host's copy beside the original array.
    (shard,) = (s.data for s in shards_of(unshared(array)) if s.device == device)
    shard.copy_to_host_async()
    return shard


def to_host_part(array: jax.Array | HostArray) -> jax.Array | HostArray:
    """Returns the part of an array that this host holds, as an array that shares the buffers."""
    part = host_part(array.sharding, array.shape)
    if isinstance(array, jax.Array):
        return shards_as(array, part.sharding, part.shape)
    whole = array.sharding.addressable_devices_indices_map(array.shape)
    within = part.sharding.addressable_devices_indices_map(part.shape)
    every = ((offset_of(within[d]), offset_of(index)) for d, index in whole.items())
    offsets = {to: at for to, at in every if at in array.parts}
    parts: Mapping[Offset, np.ndarray]
    if isinstance(array.parts, LateParts):
        parts = array.parts.moved(offsets)
    else:
        parts = {to: array.parts[at] for to, at in offsets.items()}
    return HostArray(part.shape, array.dtype, part.sharding, parts)


def resolve_rule(
    rule: ShardingRule | None, mesh: Mesh | None, name: str, abstract: jax.ShapeDtypeStruct
) -> Sharding | None:
    """Returns the sharding that the user's rule gives to a leaf, or None if there is no rule.

    Raises MismatchError if the rule returns no sharding, or one that does not fit the leaf.
    """
    if rule is None:
        return None
    answer = rule(name, abstract)
    if isinstance(answer, PartitionSpec):
        mesh = mesh or _mesh_for(answer, rule)
        if mesh is None:
            raise MismatchError(
                f"shardings({name!r}, ...) returned {answer}, and no mesh is known for it. Return "
                "a NamedSharding, or attach inside `with jax.set_mesh(mesh):`, or pass a "
                "torchax.mesh_util.Mesh as shardings.",
                mismatched={name: f"no mesh for {answer}"},
            )
        answer = NamedSharding(mesh, answer)
    if not isinstance(answer, Sharding):
        raise MismatchError(
            f"shardings({name!r}, ...) must return a jax Sharding or PartitionSpec, found "
            f"{answer!r}",
            mismatched={name: f"expected a sharding, found {answer!r}"},
        )
    answer = over_devices(answer, name, "shardings")
    try:
        if isinstance(answer, NamedSharding) and len(answer.spec) > len(abstract.shape):
            raise ValueError(f"it has {len(answer.spec)} dims, the leaf {len(abstract.shape)}.")
        answer.shard_shape(abstract.shape)
    except ValueError as error:
        raise MismatchError(
            f"{name}: shape {tuple(abstract.shape)} cannot be sharded as {answer}: {error} "
            "Return a sharding whose mesh axes divide the dims, or PartitionSpec() to replicate.",
            mismatched={name: str(error)},
        ) from error
    return answer


def over_devices(sharding: Sharding, name: str, argument: str) -> Sharding:
    """Returns a sharding, over the devices of the program's mesh if its own mesh is abstract.

    Under ``jax.set_mesh``, ``jax.eval_shape`` returns shardings over abstract meshes.
    Raises MismatchError, which names the leaf and the argument, if the two meshes differ.
    """
    if not isinstance(sharding, NamedSharding) or isinstance(sharding.mesh, Mesh):
        return sharding
    ambient = jax_versions.program_mesh()
    if isinstance(ambient, Mesh) and ambient.shape_tuple == sharding.mesh.shape_tuple:
        return NamedSharding(ambient, sharding.spec, memory_kind=sharding.memory_kind)
    expected, found = f"the mesh that jax.set_mesh sets, {ambient}", f"{sharding.mesh}"
    raise MismatchError(
        f"{name}: its sharding in {argument} is over an abstract mesh, which names no devices: "
        f"expected {expected}, found {found}. Call inside `with jax.set_mesh(mesh):`, or "
        "give jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))",
        mismatched={name: f"expected {expected}, found {found}"},
    )


def auto_axes(mesh: Mesh) -> Mesh:
    """Returns a mesh of the same devices with axes of the type Auto; torchax fails on Explicit."""
    return Mesh(mesh.devices, mesh.axis_names)


def _mesh_for(spec: PartitionSpec, rule: ShardingRule) -> Mesh | None:
    """Returns the mesh that the program set, or one of all devices along the spec's only axis."""
    ambient = jax_versions.program_mesh()
    if isinstance(ambient, Mesh) and not ambient.empty:
        return auto_axes(ambient)
    axes = set(_axes(spec)) or {a for a in [getattr(rule, "axis_name", None)] if a}
    size = getattr(rule, "axis_size", jax.device_count())
    if len(axes) <= 1 and size == jax.device_count():
        return Mesh(np.array(jax.devices()), tuple(axes) or ("replica",))
    return None


def _axes(spec: Iterable[Any]) -> Iterable[str]:
    for entry in spec:
        if isinstance(entry, tuple):
            yield from entry
        elif isinstance(entry, str):
            yield entry
