"""Where arrays lie: the placement of a leaf on the host or on devices, and the user's rule.

Knows neither torch nor storage.
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

_listing = threading.Lock()
_MAX_LOOKS = 1000


class Local(enum.Enum):
    """Placements that are not a sharding.

    HOST is a numpy array. DEFAULT_DEVICE is a JAX array that is not committed to its device, as
    ``.to("jax")`` makes them: JAX moves it to where it is used with committed arrays, whereas a
    committed one would raise there.
    """

    HOST = "host"
    DEFAULT_DEVICE = "default_device"


Placement = Sharding | Local
ShardingRule = Callable[[str, jax.ShapeDtypeStruct], "Sharding | PartitionSpec"]
"""From a leaf's name, shape and dtype to where it goes; torchax's sharders are such rules."""


def placement_of(array: jax.Array | np.ndarray) -> Placement:
    """Where the array is; also of a deleted (donated) JAX array."""
    if not isinstance(array, jax.Array):
        return Local.HOST
    return array.sharding if array.committed else Local.DEFAULT_DEVICE


def replicated_like(placement: Placement) -> Placement:
    """The same devices, every one holding the whole: for a scalar that belongs to an array."""
    if isinstance(placement, NamedSharding):
        return NamedSharding(placement.mesh, PartitionSpec(), memory_kind=placement.memory_kind)
    return placement


def stacked(sharding: Sharding) -> Sharding | None:
    """The sharding of a stack of arrays of this one, its leading axis whole; None if there is none.

    Every shard of the stack is made of shards on its own device, so stacking moves nothing.
    """
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(None, *sharding.spec)
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return sharding if isinstance(sharding, SingleDeviceSharding) else None


@dataclasses.dataclass(frozen=True)
class HostPart:
    """What the devices of this host hold of an array that lies on several hosts.

    Attributes:
      sharding: of the part, over this host's devices alone.
      shape: of the part.
      starts: where in the array the shard of each of these devices begins, in their mesh's order.
    """

    sharding: NamedSharding
    shape: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]


def spans_hosts(placement: Placement) -> bool:
    """Whether an array there lies on devices of several processes."""
    return isinstance(placement, Sharding) and not placement.is_fully_addressable


def host_part(sharding: Sharding, shape: tuple[int, ...]) -> HostPart:
    """The part of an array of this sharding and shape that this host holds.

    Raises:
      ValueError: the sharding is none over a mesh, or the host's devices are no block of the mesh.
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
    """The shards of an array on devices of this process, all of them, once each.

    JAX makes this list when it is first asked for, and of two threads that ask at the same time one
    gets what is there so far, or both add to it: with eight devices in eight of a hundred cases
    where threads change quickly (jax 0.10.2). So whoever has arrays that another thread has, or
    will have, asks here first.

    Raises:
      RuntimeError: code elsewhere has asked at the same time, and left the list wrong.
    """
    count = len(array.sharding.addressable_devices)
    with _listing:
        found = array.addressable_shards
        for _ in range(_MAX_LOOKS):
            if len(found) >= count:
                break
            time.sleep(0.001)  # another thread is making it
            found = array.addressable_shards
    if len(found) != count:
        raise RuntimeError(
            f"JAX lists {len(found)} shards of an array that lies on {count} devices of this "
            "process: two threads have asked for them at the same time"
        )
    return found


def shards_as(array: jax.Array, sharding: Sharding, shape: tuple[int, ...]) -> jax.Array:
    """The same buffers as an array of another sharding and shape; copies nothing.

    Where the array is deleted, by donation for one, so is this one.
    """
    here = [shard.data for shard in shards_of(array)]
    return jax.make_array_from_single_device_arrays(shape, sharding, here)


def unshared(array: jax.Array) -> jax.Array:
    """The same buffers as an array of its own, with which what is fetched from it goes.

    JAX keeps what it fetches from a device beside the array that was asked. Copies nothing.
    """
    return shards_as(array, array.sharding, array.shape)


def to_host_part(array: jax.Array) -> jax.Array:
    """The part of an array that this host holds, as an array of its own; copies nothing.

    ``shards_as`` gives the array back: it is made up of this host's part and those of all others.
    """
    part = host_part(array.sharding, array.shape)
    return shards_as(array, part.sharding, part.shape)


def resolve_rule(
    rule: ShardingRule | None, mesh: Mesh | None, name: str, abstract: jax.ShapeDtypeStruct
) -> Sharding | None:
    """The sharding that the user's rule gives a leaf; None without a rule.

    Raises:
      MismatchError: the rule answers something else, the dims do not divide, or a PartitionSpec
        is given where no mesh can be found.
    """
    if rule is None:
        return None
    answer = rule(name, abstract)
    if isinstance(answer, PartitionSpec):
        mesh = mesh or _mesh_for(answer, rule)
        if mesh is None:
            raise MismatchError(
                f"shardings({name!r}, ...) answered {answer}, and no mesh is known for it. Return "
                "a NamedSharding, or attach inside `with jax.set_mesh(mesh):`, or pass a "
                "torchax.mesh_util.Mesh as shardings.",
                mismatched={name: f"no mesh for {answer}"},
            )
        answer = NamedSharding(mesh, answer)
    if not isinstance(answer, Sharding):
        raise MismatchError(
            f"shardings({name!r}, ...) must answer a jax Sharding or PartitionSpec, found "
            f"{answer!r}",
            mismatched={name: f"expected a sharding, found {answer!r}"},
        )
    try:
        answer.shard_shape(abstract.shape)
    except ValueError as error:
        raise MismatchError(
            f"{name}: shape {tuple(abstract.shape)} cannot be sharded as {answer}: {error} "
            "Answer a sharding whose mesh axes divide the dims, or PartitionSpec() to replicate.",
            mismatched={name: str(error)},
        ) from error
    return answer


def auto_axes(mesh: Mesh) -> Mesh:
    """The mesh with Auto axes; torchax operations fail on the Explicit ones of jax.make_mesh."""
    return Mesh(mesh.devices, mesh.axis_names)


def _mesh_for(spec: PartitionSpec, rule: ShardingRule) -> Mesh | None:
    """The mesh that a bare PartitionSpec means: the ambient one, or all devices on its one axis."""
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
