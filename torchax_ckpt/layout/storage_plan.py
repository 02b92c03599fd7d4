"""Owns the plan: under which stored array each leaf is found.

Storage pays per array: a thousand small ones cost seconds, whatever their bytes. So leaves whose
names differ only in indices (``layers.0.wq.weight``, ``layers.1.wq.weight``, ...) and whose shape,
dtype and sharding are equal are stored as one stack, an array with a leading axis of members, named
by their pattern: ``layers.*.wq.weight``. 0-d host arrays (an optimizer's ``step`` counters) share
one vector per dtype. Large leaves stay on their own: copying them together would cost more than it
saves. Leaves without elements are not stored; the manifest holds their shape and dtype.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

from torchax_ckpt.layout import names
from torchax_ckpt.options import Layout

# An array costs storage some milliseconds, whatever its size: copying leaves together pays as long
# as that takes less. Measured by benchmarks/stacking.py; at 8 MiB it no longer does.
MAX_STACKED_LEAF_BYTES = 4 << 20
# A stack passes through host memory as a whole when it is restored.
MAX_STACK_BYTES = 64 << 20

_HOST_SCALARS = "host_scalars"
# An index is a run of digits that is a whole part of a name.
_INDEX = re.compile(r"(?<=[./])\d+(?=[./]|$)")
_ANY = "*"  # never part of a name: names.escape escapes it


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """What the plan needs to know of a leaf.

    Attributes:
      shape: the leaf's dims.
      dtype: numpy's or ml_dtypes' name of its dtype.
      nbytes: its size, over all devices.
      placement: equal for leaves that may share a stack; None for one that may not.
      on_host: whether it is a host array rather than an array on devices.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    placement: Hashable
    on_host: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where each leaf is stored.

    Attributes:
      stacks: stored name -> names of its members, in the order of the leading axis.
      empty: names of the leaves that have no elements and so are not stored.
    """

    stacks: Mapping[str, tuple[str, ...]]
    empty: frozenset[str]

    def locate(self) -> dict[str, tuple[str, int]]:
        """Name of every stacked leaf -> its stored name and index on the leading axis."""
        return {
            member: (stored, index)
            for stored, members in self.stacks.items()
            for index, member in enumerate(members)
        }


def plan_leaves(
    leaf_names: Sequence[str],
    specs: Sequence[LeafSpec],
    layout: Layout = "auto",
    taken: Iterable[str] = (),
) -> Plan:
    """Decides where each leaf is stored; the same leaves always give the same plan.

    ``taken`` are the names of stacks that there are already.
    """
    groups: dict[tuple[Hashable, ...], list[tuple[str, LeafSpec]]] = {}
    for name, spec in zip(leaf_names, specs, strict=True):
        if (key := _group(name, spec, layout)) is not None:
            groups.setdefault(key, []).append((name, spec))
    stacks: dict[str, tuple[str, ...]] = {}
    used = set(taken)
    for (pattern, *_), members in groups.items():
        size = max(1, MAX_STACK_BYTES // max(1, members[0][1].nbytes))
        for part in _split(members, size):
            if len(part) > 1:
                stored = _unused(str(pattern), used)
                used.add(stored)
                stacks[stored] = tuple(name for name, _ in part)
    empty = (n for n, s in zip(leaf_names, specs, strict=True) if math.prod(s.shape) == 0)
    return Plan(stacks=stacks, empty=frozenset(empty))


def _group(name: str, spec: LeafSpec, layout: Layout) -> tuple[Hashable, ...] | None:
    """What a leaf has in common with those it is stacked with; None for one on its own."""
    if layout == "flat" or spec.placement is None or math.prod(spec.shape) == 0:
        return None
    if spec.on_host and spec.shape == ():
        return (names.join((_HOST_SCALARS, spec.dtype)), True)
    if layout == "auto" and spec.nbytes > MAX_STACKED_LEAF_BYTES:
        return None
    pattern = _INDEX.sub(_ANY, name)
    if pattern == name:
        return None
    return (pattern, spec.on_host, spec.shape, spec.dtype, spec.placement)


def _split(members: list[tuple[str, LeafSpec]], size: int) -> Iterable[list[tuple[str, LeafSpec]]]:
    return (members[i : i + size] for i in range(0, len(members), size))


def _unused(pattern: str, taken: Collection[str]) -> str:
    """The pattern, told apart from stacks of the same pattern but another shape or sharding."""
    if pattern not in taken:
        return pattern
    return next(n for i in itertools.count(2) if (n := f"{pattern}{_ANY}{i}") not in taken)
