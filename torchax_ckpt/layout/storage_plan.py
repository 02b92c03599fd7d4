"""Makes the storage plan, which says in which stored array each leaf lies.

Storage takes a minimum time for each array, however small. Therefore leaves are stored as one
array, a stack, if their names differ only in indices (``layers.0.wq.weight``,
``layers.1.wq.weight``, ...) and their shape, dtype and sharding are equal. Along its first axis, a
stack has one entry for each member. In its name, ``*`` replaces the indices, as in
``layers.*.wq.weight``. All 0-d host arrays of one dtype (an optimizer's ``step`` counters) are one
vector. Large leaves are stored alone, because copying them would take more time than a stack saves.
No stack has frozen leaves beside others. Leaves without elements are not stored; the manifest
records their shape and dtype.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

from torchax_ckpt.layout import names
from torchax_ckpt.options import Layout

# Each array costs some milliseconds in storage, whatever its size. Stacking pays if copying a leaf
# takes less time than that. For leaves of 8 MiB, copying was measured to take more.
MAX_STACKED_LEAF_BYTES = 4 << 20
# Stacks are bounded, because a restore passes a whole stack through host memory.
MAX_STACK_BYTES = 64 << 20

MAX_RANK = 32  # the most dims of a stored array: TensorStore's limit

_HOST_SCALARS = "host_scalars"
# An index is a part of a name that consists of digits only.
_INDEX = re.compile(r"(?<=[./])\d+(?=[./]|$)")
_ANY = "*"  # occurs in no leaf's name, because names.escape escapes it


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """The properties of a leaf on which the storage plan depends.

    ``placement`` is equal for leaves that may share a stack, and None for a leaf that must be
    stored alone. A stack has no frozen leaves beside others, so that a save can reuse its files.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    placement: Hashable
    is_on_host: bool
    is_frozen: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """A storage plan, which says where each leaf is stored.

    Attributes:
      stacks: stored name of a stack -> names of its members, in the order of the leading axis.
      empty: names of the leaves that have no elements and are therefore not stored.
    """

    stacks: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    empty: frozenset[str] = frozenset()

    def members(self, leaf_names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Returns the name of each stored array -> the leaves in it, given the names of all."""
        alone = {n: (n,) for n in leaf_names if n not in self.empty}
        for group in self.stacks.values():
            for member in group:
                del alone[member]
        return {**alone, **self.stacks}

    def locate(self) -> dict[str, tuple[str, int]]:
        """Returns stacked leaf -> (name of the stack, index on its leading axis)."""
        return {
            member: (stored, index)
            for stored, members in self.stacks.items()
            for index, member in enumerate(members)
        }


def plan_leaves(
    leaf_names: Sequence[str],
    specs: Sequence[LeafSpec],
    layout: Layout = "auto",
    reserved: Iterable[str] = (),
) -> Plan:
    """Returns the storage plan for leaves; the same leaves always give the same plan.

    ``specs`` are in the order of ``leaf_names``; no stack may have one of the ``reserved`` names.
    """
    groups: dict[tuple[Hashable, ...], list[tuple[str, LeafSpec]]] = {}
    for name, spec in zip(leaf_names, specs, strict=True):
        if (key := _group(name, spec, layout)) is not None:
            groups.setdefault(key, []).append((name, spec))
    stacks: dict[str, tuple[str, ...]] = {}
    used = set(reserved)
    for (pattern, *_), members in groups.items():
        size = max(1, MAX_STACK_BYTES // max(1, members[0][1].nbytes))
        for first in range(0, len(members), size):
            part = members[first : first + size]
            if len(part) > 1:
                stored = _unused(str(pattern), used)
                used.add(stored)
                stacks[stored] = tuple(name for name, _ in part)
    empty = (n for n, s in zip(leaf_names, specs, strict=True) if math.prod(s.shape) == 0)
    return Plan(stacks=stacks, empty=frozenset(empty))


def _group(name: str, spec: LeafSpec, layout: Layout) -> tuple[Hashable, ...] | None:
    """Returns a key equal for leaves that may share a stack; None for a leaf in no stack."""
    if layout == "flat" or spec.placement is None or math.prod(spec.shape) == 0:
        return None
    if spec.is_on_host and spec.shape == ():
        return (names.join((_HOST_SCALARS, spec.dtype)), True)
    if spec.nbytes > MAX_STACKED_LEAF_BYTES or len(spec.shape) == MAX_RANK:
        return None
    pattern = _INDEX.sub(_ANY, name)
    if pattern == name:
        return None
    return (pattern, spec.is_on_host, spec.shape, spec.dtype, spec.placement, spec.is_frozen)


def _unused(pattern: str, used: Collection[str]) -> str:
    """Returns a name for a new stack: the pattern, with a suffix if another stack has this name."""
    if pattern not in used:
        return pattern
    return next(n for i in itertools.count(2) if (n := f"{pattern}{_ANY}{i}") not in used)
