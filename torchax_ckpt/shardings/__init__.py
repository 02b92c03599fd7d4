"""Sharding rules: functions that say how the tensors of a model lie on the devices of a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torchax_ckpt.errors import ArgumentError

__all__ = ["fsdp"]


def fsdp(mesh: Mesh, *axes: str) -> Callable[[Any, Any], NamedSharding]:
    """Returns the rule of fully sharded data parallel: every device holds its part of each tensor.

    The rule shards one dim of a tensor, over all the axes together: the longest that the number of
    devices along them divides, the first of equally long ones. A tensor without such a dim is
    replicated: scalars, also those of Python, and for example biases shorter than that number.
    Names and dtypes do not matter, and a part has whole elements.

    ``attach(shardings=)`` and ``warm_start(shardings=)`` take the rule. The optimizer's moments
    follow their parameters. For a pytree, ``jax.tree_util.tree_map_with_path(rule, tree)`` returns
    the sharding of each leaf; what ``jax.eval_shape`` returns will do as the tree.

    Args:
      mesh: the devices, along any number of axes: ``Mesh(np.array(jax.devices()), ("fsdp",))``.
      axes: the names of the axes to shard over; without any, over all. Tensors are replicated along
        the others: if a mesh has the axes ``slice`` and ``fsdp``, ``fsdp(mesh, "fsdp")`` gives
        each slice a whole copy, as ``planning.on_topology`` plans it for slices.

    Returns:
      A function of a name and of an array, real or abstract, or a number, which returns a
      ``NamedSharding``.

    Raises:
      ArgumentError: ``mesh`` is no mesh of JAX, has no such axis, or an axis is given twice.
    """
    if not isinstance(mesh, Mesh):
        kind = f"{type(mesh).__module__}.{type(mesh).__name__}"
        raise ArgumentError(
            f"fsdp: mesh: expected a jax.sharding.Mesh, found a {kind}; give "
            + (
                "its jax_mesh"
                if isinstance(getattr(mesh, "jax_mesh", None), Mesh)
                else 'Mesh(np.array(jax.devices()), ("fsdp",))'
            )
        )
    if len({*axes}) < len(axes):
        raise ArgumentError(f"fsdp: axes: expected each axis once, found {', '.join(axes)}")
    for axis in axes:
        if axis not in mesh.axis_names:
            raise ArgumentError(
                f"fsdp: axes: expected axes of the mesh, which has {', '.join(mesh.axis_names)}, "
                f"found {axis!r}; name some of these, or none to shard over all"
            )
    lengths = {axis: mesh.shape[axis] for axis in axes or mesh.axis_names}
    return lambda name, leaf: NamedSharding(mesh, fsdp_spec(getattr(leaf, "shape", ()), lengths))


def fsdp_spec(shape: Sequence[int], axes: Mapping[str, int]) -> PartitionSpec:
    """Returns how ``fsdp`` shards a tensor; ``axes`` has the lengths of the axes to shard over."""
    over = [axis for axis, length in axes.items() if length > 1]
    count = math.prod(axes.values())
    divided = [dim for dim, length in enumerate(shape) if length and length % count == 0]
    if not over or not divided:
        return PartitionSpec()
    longest = max(divided, key=lambda dim: shape[dim])
    return PartitionSpec(*[None] * longest, over[0] if len(over) == 1 else tuple(over))
