"""Owns the plan: under which stored array each leaf is found.

A leaf is stored under its own name unless the plan puts it into a stack, an array with a leading
axis of members. Today 0-d host arrays of one dtype (an optimizer's ``step`` counters) share one
vector each: storage pays per array, and a thousand counters would cost more than the weights.
Leaves without elements are not stored; the manifest holds their shape and dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from torchax_ckpt.layout import names

_HOST_SCALARS = "host_scalars"


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """What the plan needs to know of a leaf.

    Attributes:
      shape: the leaf's dims.
      dtype: numpy's or ml_dtypes' name of its dtype.
      on_host: whether it is a host array rather than an array on devices.
    """

    shape: tuple[int, ...]
    dtype: str
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


def plan_leaves(specs: Mapping[str, LeafSpec]) -> Plan:
    """Decides where each leaf is stored; the same specs always give the same plan."""
    scalars: dict[str, list[str]] = {}
    for name, spec in specs.items():
        if spec.on_host and spec.shape == ():
            scalars.setdefault(spec.dtype, []).append(name)
    return Plan(
        stacks={
            names.join((_HOST_SCALARS, dtype)): tuple(members)
            for dtype, members in sorted(scalars.items())
        },
        empty=frozenset(n for n, spec in specs.items() if math.prod(spec.shape) == 0),
    )


def nest(stored_names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Stored name -> the two dict keys it is stored under: its component, and the rest."""
    return {name: names.component_and_rest(name) for name in stored_names}
