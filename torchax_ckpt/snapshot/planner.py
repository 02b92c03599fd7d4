"""Plans which leaves a save stores in one array, and computes the device memory for doing so."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from torchax_ckpt.layout.storage_plan import LeafSpec, Plan, plan_leaves
from torchax_ckpt.options import Layout
from torchax_ckpt.snapshot.device_memory import is_exhausted
from torchax_ckpt.snapshot.sharding import stacked
from torchax_ckpt.snapshot.stacking import AnyArray, Array, bytes_to_execute, execute


class Planner:
    """Plans where a save stores each leaf.

    The planner reuses the last plan as long as no name, shape, dtype or sharding of the leaves
    changes. The training thread and the threads of saves to several tiers may call one planner at
    the same time.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._may_stack = True
        self._known = Planned((), [], True, Plan({}, frozenset()))

    def __call__(self, names: Sequence[str], arrays: Sequence[AnyArray]) -> Plan:
        """Returns the storage plan for leaves with these names and arrays."""
        return self.planned(names, arrays).plan

    def planned(self, names: Sequence[str], arrays: Sequence[AnyArray]) -> Planned:
        """Returns a ``Planned`` with the storage plan for these leaves."""
        signatures = [
            (a.shape, a.dtype, None if isinstance(a, np.ndarray) else a.sharding) for a in arrays
        ]
        known, may_stack = self._known, self._may_stack
        if (signatures, names, may_stack) != (known.signatures, known.names, known.may_stack):
            plan = plan_leaves(names, [_spec(array) for array in arrays], self._layout)
            if not may_stack:
                plan = unstacked(plan, dict(zip(names, arrays, strict=True)))
            self._known = known = Planned(names, signatures, may_stack, plan)
        return known

    def stack_no_more(self) -> None:
        """Makes the planner store device arrays one by one, without stacks, in all later plans."""
        self._may_stack = False


@dataclasses.dataclass(frozen=True)
class Planned:
    """Leaves, their storage plan, and the memory that the plan takes on devices.

    A planner keeps the last ``Planned`` that it made, to reuse it for the same leaves. Leaves and
    plan are in one object, so that a thread never uses a plan that was made for other leaves.

    Attributes:
      names, signatures: of the leaves: names, and shapes, dtypes and shardings.
      may_stack: whether the planner was allowed to stack.
      plan: the plan of the leaves.
    """

    names: Sequence[str]
    signatures: list[Any]
    may_stack: bool
    plan: Plan
    _sizes: dict[bool, Mapping[jax.Device, int] | None] = dataclasses.field(default_factory=dict)

    def bytes_on_devices(
        self, arrays: Sequence[AnyArray], *, copy: bool
    ) -> Mapping[jax.Device, int] | None:
        """Returns the bytes that ``execute`` takes on each device; None if no device has so many.

        The first call with a value of ``copy`` compiles the programs that ``execute`` runs. Later
        calls with the same value return the same result without computing it again.

        Args:
          arrays: the leaves, in the order of ``names``.
          copy: whether ``execute`` copies the arrays that are not stacked.
        """
        if copy not in self._sizes:
            leaves = dict(zip(self.names, arrays, strict=True))
            try:
                self._sizes[copy] = bytes_to_execute(self.plan, leaves, copy=copy)
            except jax.errors.JaxRuntimeError as error:
                if not is_exhausted(error):
                    raise
                self._sizes[copy] = None  # the compiler refuses what no device can hold
        return self._sizes[copy]


def _spec(array: AnyArray) -> LeafSpec:
    placement = True if isinstance(array, np.ndarray) else stacked(array.sharding)
    return LeafSpec(
        shape=tuple(array.shape),
        dtype=array.dtype.name,
        nbytes=math.prod(array.shape) * array.dtype.itemsize,
        placement=placement,
        on_host=isinstance(array, np.ndarray),
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


def unstacked(plan: Plan, arrays: Mapping[str, AnyArray]) -> Plan:
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
