"""Plans which leaves a save stores in one array, and computes the memory for their snapshots."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from torchax_ckpt.devices.device_memory import is_exhausted
from torchax_ckpt.devices.device_sizes import Needed
from torchax_ckpt.devices.sharding import sharding_of_stack
from torchax_ckpt.layout.storage_plan import LeafSpec, Plan, plan_leaves
from torchax_ckpt.options import Layout
from torchax_ckpt.snapshot.offload import needed_to_offload
from torchax_ckpt.snapshot.stacking import Array, MaybeAbstract, execute, needed_to_execute

Way = Literal["reference", "copy", "offload", "transfer"]


@dataclasses.dataclass(frozen=True)
class SnapshotPlan:
    """The storage plan of the leaves of a snapshot, and the memory that they need."""

    names: Sequence[str]
    plan: Plan
    _needed: dict[Way, Needed | None] = dataclasses.field(default_factory=dict)

    def needed(self, way: Way, arrays: Sequence[MaybeAbstract]) -> Needed | None:
        """Returns the memory that a snapshot takes with its stacks; None if no device has so much.

        The first call for a way compiles the programs. ``arrays`` are the leaves, perhaps abstract.
        """
        if way not in self._needed:
            leaves = dict(zip(self.names, arrays, strict=True))
            try:
                if way == "offload":
                    self._needed[way] = needed_to_offload(self.divided(leaves)[0])
                else:
                    self._needed[way] = needed_to_execute(self.plan, leaves, copy=way == "copy")
            except jax.errors.JaxRuntimeError as error:
                if not is_exhausted(error):
                    raise
                self._needed[way] = None
        return self._needed[way]

    def divided(self, leaves: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the leaves on devices that are stored, and those on the host."""
        on_devices, on_host = {}, {}
        for name, array in leaves.items():
            if isinstance(array, np.ndarray):
                on_host[name] = array
            elif name not in self.plan.empty:
                on_devices[name] = array
        return on_devices, on_host


class Planner:
    """Plans where saves store the leaves; plans anew only if something about the leaves changes.

    The training thread and the threads of saves may call one planner at the same time.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout: Layout = layout
        self._last: tuple[tuple[Any, ...], SnapshotPlan] | None = None

    def __call__(
        self,
        names: Sequence[str],
        arrays: Sequence[Array],
        reserved: Collection[str] = frozenset(),
        frozen: Collection[str] = frozenset(),
    ) -> SnapshotPlan:
        """Returns ``plan_snapshot`` of the leaves."""
        shardings = [None if isinstance(a, np.ndarray) else a.sharding for a in arrays]
        shapes, dtypes = [a.shape for a in arrays], [a.dtype for a in arrays]
        signature = shapes, dtypes, shardings, names, reserved, frozen
        last = self._last
        if last is None or last[0] != signature:
            plan = plan_snapshot(names, arrays, self._layout, reserved, frozen)
            self._last = last = signature, plan
        return last[1]


def plan_snapshot(
    names: Sequence[str],
    arrays: Sequence[MaybeAbstract],
    layout: Layout,
    reserved: Collection[str] = (),
    frozen: Collection[str] = (),
) -> SnapshotPlan:
    """Plans where a save stores the leaves, perhaps abstract.

    No stack has one of the names ``reserved``, or has ``frozen`` leaves together with others.
    """
    specs = [
        LeafSpec(
            shape=tuple(array.shape),
            dtype=array.dtype.name,
            nbytes=math.prod(array.shape) * array.dtype.itemsize,
            placement=True if isinstance(array, np.ndarray) else sharding_of_stack(array.sharding),
            is_on_host=isinstance(array, np.ndarray),
            is_frozen=name in frozen,
        )
        for name, array in zip(names, arrays, strict=True)
    ]
    return SnapshotPlan(names, plan_leaves(names, specs, layout, reserved))


def with_host_leaves(
    plan: Plan, leaves: Mapping[str, np.ndarray], layout: Layout
) -> tuple[Plan, dict[str, Array]]:
    """Adds leaves on the host to a plan; returns the new plan, and the arrays to store for them."""
    more = plan_snapshot([*leaves], [*leaves.values()], layout, reserved=plan.stacks).plan
    stored = execute(more, leaves, copy=False)
    return Plan({**plan.stacks, **more.stacks}, plan.empty | more.empty), stored
