"""Decides which leaves of a save are stored together in one array, a stack, and stacks them."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from torchax_ckpt.layout.storage_plan import LeafSpec, Plan, plan_leaves
from torchax_ckpt.options import Layout
from torchax_ckpt.snapshot.bitcast import from_bits, is_small_float, to_bits
from torchax_ckpt.snapshot.sharding import shards_of, stacked

Array = jax.Array | np.ndarray

# The most arguments of one jitted call; its compile time grows faster than linearly with them.
_CHUNK = 128


class Planner:
    """Plans where a save stores each leaf.

    The planner reuses the last plan as long as no name, shape, dtype or sharding of the leaves
    changes. The training thread and the threads of saves to several tiers may call one planner at
    the same time.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._may_stack = True
        # The names and signatures of the last leaves and their plan. They are one attribute, so
        # that a thread never combines leaves with the plan of other leaves.
        self._known: tuple[Sequence[str], list[Any], Plan] = ((), [], Plan({}, frozenset()))

    def __call__(self, names: Sequence[str], arrays: Sequence[Array]) -> Plan:
        """Returns the storage plan for leaves with these names and arrays."""
        signatures = [
            (a.shape, a.dtype, a.sharding if isinstance(a, jax.Array) else None) for a in arrays
        ]
        known_names, known_signatures, plan = self._known
        if signatures != known_signatures or names != known_names:
            plan = plan_leaves(names, [_spec(array) for array in arrays], self._layout)
            self._known = (names, signatures, plan)
        return plan if self._may_stack else unstacked(plan, dict(zip(names, arrays, strict=True)))

    def stack_no_more(self) -> None:
        """Makes the planner store device arrays one by one, without stacks, in all later plans."""
        self._may_stack = False


def _spec(array: Array) -> LeafSpec:
    on_host = not isinstance(array, jax.Array)
    return LeafSpec(
        shape=tuple(array.shape),
        dtype=array.dtype.name,
        nbytes=math.prod(array.shape) * array.dtype.itemsize,
        placement=True if isinstance(array, np.ndarray) else stacked(array.sharding),
        on_host=on_host,
    )


def beside(
    plan: Plan, leaves: Mapping[str, np.ndarray], layout: Layout
) -> tuple[Plan, dict[str, Array]]:
    """Adds further leaves to a plan; returns the new plan, and the arrays to store for them.

    Args:
      plan: the plan of the leaves so far.
      leaves: name -> array of each further leaf, all on the host.
      layout: which of the further leaves are stacked.
    """
    specs = [_spec(array) for array in leaves.values()]
    more = plan_leaves(list(leaves), specs, layout, taken=plan.stacks)
    stored = execute(more, leaves, copy=False)
    return Plan({**plan.stacks, **more.stacks}, plan.empty | more.empty), stored


def unstacked(plan: Plan, arrays: Mapping[str, Array]) -> Plan:
    """Returns the plan without its stacks of device arrays; stacks of host arrays remain.

    Args:
      plan: the plan.
      arrays: name -> array, either for the leaves or for the stored arrays.
    """
    stacks = {
        name: group
        for name, group in plan.stacks.items()
        if not isinstance(arrays.get(name, arrays.get(group[0])), jax.Array)
    }
    return Plan(stacks, plan.empty)


def execute(plan: Plan, leaves: Mapping[str, Array], *, copy: bool) -> dict[str, Array]:
    """Stacks leaves as the plan says; returns a dict from stored name to the array to store.

    Args:
      plan: where each leaf is stored.
      leaves: name -> array of each leaf.
      copy: whether to copy device arrays that are not stacked.
    """
    members = {member for group in plan.stacks.values() for member in group}
    alone = {n: a for n, a in leaves.items() if n not in members and n not in plan.empty}
    stored = _copies(alone) if copy else alone
    for name, group in plan.stacks.items():
        stored[name] = _stack([leaves[member] for member in group])
    return stored


def _stack(arrays: list[Array]) -> Array:
    first = arrays[0]
    if not isinstance(first, jax.Array):
        return np.stack(arrays)
    target = stacked(first.sharding)
    assert target is not None, "planned as a stack"
    if not first.is_fully_addressable:
        rows = zip(*(_parts(array) for array in arrays), strict=True)
        shape = (len(arrays), *first.shape)
        return _assembled(shape, target, [_stack([*row]) for row in rows])
    parts = [_stack_onto(target)(*chunk) for chunk in _chunks(arrays, _CHUNK)]
    return parts[0] if len(parts) == 1 else _concatenate_onto(target)(*parts)


def _copies(leaves: Mapping[str, Array]) -> dict[str, Array]:
    arrays = {name: array for name, array in leaves.items() if isinstance(array, jax.Array)}
    parts = {name: _parts(array) for name, array in arrays.items()}
    by_sharding: dict[Sharding, list[tuple[str, int]]] = collections.defaultdict(list)
    for name, leaf_parts in parts.items():
        for index, part in enumerate(leaf_parts):
            by_sharding[part.sharding].append((name, index))
    for sharding, members in by_sharding.items():
        for chunk in _chunks(members, _CHUNK):
            copies = _copy_onto(sharding)(*(parts[name][index] for name, index in chunk))
            for (name, index), copy in zip(chunk, copies, strict=True):
                parts[name][index] = copy
    copied = {n: _assembled(a.shape, a.sharding, parts[n]) for n, a in arrays.items()}
    return {**leaves, **copied}


def _parts(array: Any) -> list[Any]:
    """Returns a list: the array itself, or this process's shards if the array spans processes.

    A computation on one shard involves only the process that holds the shard, so any thread may
    start the computation, independently of other processes.
    """
    if array.is_fully_addressable:
        return [array]
    return [shard.data for shard in shards_of(array)]


def _assembled(shape: tuple[int, ...], sharding: Sharding, parts: list[Any]) -> jax.Array:
    """Makes an array of this shape and sharding from ``parts``, as ``_parts`` would return them."""
    if sharding.is_fully_addressable:
        return parts[0]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


@functools.lru_cache(maxsize=256)
def _copy_onto(sharding: Sharding) -> Callable[..., tuple[jax.Array, ...]]:
    return jax.jit(lambda *xs: tuple(jnp.copy(x) for x in xs), out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _stack_onto(sharding: Sharding) -> Callable[..., jax.Array]:
    return jax.jit(lambda *xs: _by_bits(jnp.stack, xs), out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _concatenate_onto(sharding: Sharding) -> Callable[..., jax.Array]:
    return jax.jit(lambda *xs: _by_bits(jnp.concatenate, xs), out_shardings=sharding)


def _by_bits(join: Callable[..., jax.Array], arrays: Sequence[jax.Array]) -> jax.Array:
    """Joins arrays by calling ``join``.

    Floats of fewer than 32 bits are joined as integers of their bits, because XLA could convert the
    floats and change the bits of NaNs.
    """
    dtype = arrays[0].dtype
    if not is_small_float(dtype):
        return join(arrays)
    return from_bits(join([to_bits(array) for array in arrays]), dtype)


def _chunks(items: Iterable[Any], size: int) -> Iterable[list[Any]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
