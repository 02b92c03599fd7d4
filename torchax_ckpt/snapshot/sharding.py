"""Placements: where a leaf lies, on the host or on devices, and the user's rule for shardings.

This module uses neither torch nor storage.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from torchax_ckpt.errors import MismatchError

_listing_lock = threading.Lock()
_MAX_TRIES = 1000


class Local(enum.Enum):
    """Placements that are not a sharding.

    HOST means a numpy array. DEFAULT_DEVICE means a JAX array that is not committed to its device,
    such as ``.to("jax")`` makes. If a program uses an uncommitted array together with committed
    arrays, JAX moves it to the devices of the committed arrays. If it were committed to another
    device, JAX would raise an error.
    """

    HOST = "host"
    DEFAULT_DEVICE = "default_device"


Placement = Sharding | Local
ShardingRule = Callable[[str, jax.ShapeDtypeStruct], "Sharding | PartitionSpec"]
"""A leaf's name and its shape and dtype -> its sharding; torchax's sharders have this signature."""


def placement_of(array: jax.Array | np.ndarray) -> Placement:
    """Returns where the array lies; works for a deleted (donated) JAX array too."""
    if not isinstance(array, jax.Array):
        return Local.HOST
    return array.sharding if array.committed else Local.DEFAULT_DEVICE


def replicated_like(placement: Placement) -> Placement:
    """Returns the placement of a scalar that belongs to an array with the given placement.

    The scalar's placement covers the same devices, and each of them has the whole scalar.
    """
    if isinstance(placement, NamedSharding):
        return NamedSharding(placement.mesh, PartitionSpec(), memory_kind=placement.memory_kind)
    return placement


def stacked(sharding: Sharding) -> Sharding | None:
    """Returns the sharding of a stack of arrays with this sharding; None if there is none.

    The leading axis of the stack is not sharded, so each shard of the stack consists of the
    arrays' shards on the same device, and stacking moves nothing between devices.
    """
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(None, *sharding.spec)
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return sharding if isinstance(sharding, SingleDeviceSharding) else None


@dataclasses.dataclass(frozen=True)
class HostPart:
    """The part of an array on several hosts that the devices of this host hold.

    Attributes:
      sharding: the sharding of the part, over this host's devices only.
      shape: the shape of the part.
      starts: for each device, in the order of the part's mesh, the index in the array at which the
        device's shard begins.
    """

    sharding: NamedSharding
    shape: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]


def spans_hosts(placement: Placement) -> bool:
    """Returns whether an array with this placement lies on devices of several processes."""
    return isinstance(placement, Sharding) and not placement.is_fully_addressable


def host_part(sharding: Sharding, shape: tuple[int, ...]) -> HostPart:
    """Returns the part that this host holds of an array with this sharding and shape.

    Raises:
      ValueError: the sharding has no mesh, or the host's devices do not form a block of the mesh.
    """
    if not isinstance(sharding, NamedSharding):
        raise ValueError(f"expected arrays on a mesh (NamedSharding), found {sharding}")
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
    """Returns all shards of an array on devices of this process, each once.

    ``array.addressable_shards`` is not thread-safe. JAX builds the list at the first access. If two
    threads access it at the same time, one thread can get a partial list, or both can append to
    it. With eight devices and frequent thread switches this happened in eight of a hundred cases
    (jax 0.10.2). Code that shares an array with another thread must therefore list the shards
    through this function.

    Raises:
      RuntimeError: other code built the list at the same time and left it wrong.
    """
    count = len(array.sharding.addressable_devices)
    with _listing_lock:
        found = array.addressable_shards
        for _ in range(_MAX_TRIES):
            if len(found) >= count:
                break
            time.sleep(0.001)  # another thread is building the list
            found = array.addressable_shards
    if len(found) != count:
        raise RuntimeError(
            f"JAX lists {len(found)} shards of an array that lies on {count} devices of this "
            "process: two threads accessed array.addressable_shards at the same time"
        )
    return found


def shards_as(array: jax.Array, sharding: Sharding, shape: tuple[int, ...]) -> jax.Array:
    """Returns an array of the same buffers with another sharding and shape; copies nothing.

    If the given array is deleted, for example by donation, the returned array is deleted too.
    """
    here = [shard.data for shard in shards_of(array)]
    return jax.make_array_from_single_device_arrays(shape, sharding, here)


def unshared(array: jax.Array) -> jax.Array:
    """Returns a new array of the same buffers; copies nothing.

    JAX caches the host copy of an array inside that array object. If the host copy is fetched from
    the new object, it is freed together with that object.
    """
    return shards_as(array, array.sharding, array.shape)


def to_host_part(array: jax.Array) -> jax.Array:
    """Returns the part of an array that this host holds, as a separate array; copies nothing.

    ``shards_as`` turns the part back into the whole array, to which each host contributes its part.
    """
    part = host_part(array.sharding, array.shape)
    return shards_as(array, part.sharding, part.shape)


def resolve_rule(
    rule: ShardingRule | None, mesh: Mesh | None, name: str, abstract: jax.ShapeDtypeStruct
) -> Sharding | None:
    """Returns the sharding that the user's rule returns for a leaf; None without a rule.

    Raises:
      MismatchError: the rule returns neither a Sharding nor a PartitionSpec, the mesh axes do not
        divide the dims, or the rule returns a PartitionSpec and no mesh can be found for it.
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
    try:
        answer.shard_shape(abstract.shape)
    except ValueError as error:
        raise MismatchError(
            f"{name}: shape {tuple(abstract.shape)} cannot be sharded as {answer}: {error} "
            "Return a sharding whose mesh axes divide the dims, or PartitionSpec() to replicate.",
            mismatched={name: str(error)},
        ) from error
    return answer


def auto_axes(mesh: Mesh) -> Mesh:
    """Returns the mesh with Auto axes; torchax fails on the Explicit axes of ``jax.make_mesh``."""
    return Mesh(mesh.devices, mesh.axis_names)


def _mesh_for(spec: PartitionSpec, rule: ShardingRule) -> Mesh | None:
    """Returns the mesh for a PartitionSpec that a rule returned; None if no mesh can be found.

    The result is the ambient mesh. If no ambient mesh is set, the result is a mesh of all devices
    along the only axis of the spec.
    """
    ambient = jax.sharding.get_mesh()
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
