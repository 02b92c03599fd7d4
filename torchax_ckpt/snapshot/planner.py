"""Plans which leaves a save stores in one array, and computes the device memory for doing so."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from torchax_ckpt.layout.storage_plan import LeafSpec, Plan, plan_leaves
from torchax_ckpt.options import Layout
from torchax_ckpt.snapshot.device_memory import is_exhausted
from torchax_ckpt.snapshot.device_programs import MAX_ARGUMENTS
from torchax_ckpt.snapshot.device_sizes import Needed, shard_bytes
from torchax_ckpt.snapshot.offload import bytes_to_offload
from torchax_ckpt.snapshot.sharding import stacked
from torchax_ckpt.snapshot.stacking import AnyArray, Array, bytes_to_execute, execute

T = TypeVar("T")
# How many divisions of the leaves a ``Planned`` remembers.
_MAX_DIVISIONS = 8


class Planner:
    """Plans where a save stores each leaf.

    The planner reuses the last plan as long as no name, shape, dtype or sharding of the leaves
    changes. The training thread and the threads of saves to several tiers may call one planner at
    the same time.

    Attributes:
      still: the names of the leaves that do not change from save to save, which are not stacked
        with other leaves. Replaced as a whole, never changed in place.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._may_stack = True
        self.still: frozenset[str] = frozenset()
        nothing = Plan({}, frozenset())
        self._known = Planned((), [], True, self.still, frozenset(), nothing, nothing)

    def __call__(
        self,
        names: Sequence[str],
        arrays: Sequence[AnyArray],
        taken: frozenset[str] = frozenset(),
        still: frozenset[str] | None = None,
    ) -> Planned:
        """Returns the leaves with their storage plan.

        Args:
          names: the names of the leaves.
          arrays: the arrays of the leaves; abstract arrays with shardings may stand for arrays on
            devices.
          taken: names that no stack may have.
          still: replaces the attribute ``still``, which may have changed since a snapshot.
        """
        signatures = [
            (a.shape, a.dtype, None if isinstance(a, np.ndarray) else a.sharding) for a in arrays
        ]
        known, may_stack = self._known, self._may_stack
        still = self.still if still is None else still
        if (signatures, names, may_stack, still, taken) != (
            known.signatures,
            known.names,
            known.may_stack,
            known.still,
            known.taken,
        ):
            specs = [_spec(a, is_still=n in still) for n, a in zip(names, arrays, strict=True)]
            plan = plan_leaves(names, specs, self._layout, taken)
            flat = _unstacked(plan, dict(zip(names, arrays, strict=True)))
            plan = plan if may_stack else flat
            self._known = known = Planned(names, signatures, may_stack, still, taken, plan, flat)
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
      still: which leaves do not change.
      taken: the names that no stack may have.
      plan: the plan of the leaves.
      flat: the plan without its stacks of device arrays.
    """

    names: Sequence[str]
    signatures: list[Any]
    may_stack: bool
    still: frozenset[str]
    taken: frozenset[str]
    plan: Plan
    flat: Plan
    _sizes: dict[bool, Mapping[jax.Device, int] | None] = dataclasses.field(default_factory=dict)
    _divisions: dict[frozenset[str], Needed | None] = dataclasses.field(default_factory=dict)
    _totals: dict[str, Mapping[jax.Device, int]] = dataclasses.field(default_factory=dict)

    @property
    def bounds(self) -> tuple[frozenset[str], frozenset[str]]:
        """The arguments ``taken`` and ``still`` with which a planner makes this plan again."""
        return self.taken, self.still

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
            self._sizes[copy] = _unless_refused(
                lambda: bytes_to_execute(self.plan, leaves, copy=copy)
            )
        return self._sizes[copy]

    def divided(
        self, arrays: Sequence[AnyArray], copied: Collection[str]
    ) -> tuple[Plan, dict[str, Any], dict[str, Any]]:
        """Divides the leaves into those to copy and those to offload.

        Returns the plan of the first, the first with the leaves on the host, and the others.

        Args:
          arrays: the leaves, in the order of ``names``.
          copied: the names of the arrays to store that are copied on devices.
        """
        leaves = dict(zip(self.names, arrays, strict=True))
        offloaded = {
            leaf: leaves.pop(leaf)
            for name, group in self.plan.members(self.names).items()
            if name not in copied and not isinstance(leaves[group[0]], np.ndarray)
            for leaf in group
        }
        stacks = {n: group for n, group in self.plan.stacks.items() if group[0] in leaves}
        return Plan(stacks, self.plan.empty), leaves, offloaded

    def bytes_if_divided(self, arrays: Sequence[AnyArray], copied: frozenset[str]) -> Needed | None:
        """Returns the memory that ``divided`` leaves take; None if no device has so much.

        Like ``bytes_on_devices``, compiles the programs at the first call.
        """
        if copied not in self._divisions:
            plan, copies, offloaded = self.divided(arrays, copied)

            def needed() -> Needed:
                of_copies = bytes_to_execute(plan, copies, copy=True)
                of_others = bytes_to_offload(offloaded)
                devices = collections.Counter(of_copies) + collections.Counter(of_others.devices)
                return dataclasses.replace(of_others, devices=devices)

            if len(self._divisions) >= _MAX_DIVISIONS:
                del self._divisions[next(iter(self._divisions))]
            self._divisions[copied] = _unless_refused(needed)
        return self._divisions[copied]

    def division(
        self,
        arrays: Sequence[AnyArray],
        holds: Callable[[Mapping[jax.Device, int] | None], bool],
    ) -> frozenset[str] | None:
        """Returns which of the arrays to store can be copied on devices if the rest is offloaded.

        The smallest arrays are copied, because a transfer to the host takes some time for each
        array, whatever its size. An earlier result is returned again if it fits and copies at least
        half as many arrays as could be copied, because the programs of another result would have to
        be compiled. None means that the devices lack memory even to offload all.

        Args:
          arrays: the leaves, in the order of ``names``.
          holds: whether the devices have memory for the bytes on each device.
        """
        if not self._totals:
            self._totals.update(self._copy_totals(arrays))
        names, totals = [*self._totals], [*self._totals.values()]
        count = bisect.bisect_left(range(len(totals)), True, key=lambda n: not holds(totals[n]))
        fitting = (c for c, n in self._divisions.items() if n is not None and holds(n.devices))
        known = max(fitting, key=len, default=None)
        if known is not None and 2 * len(known) >= count:
            return known
        # The totals leave out temporary memory, so that fewer arrays may fit.
        for number in (count, count // 2, 0):
            copied = frozenset(names[:number])
            needed = self.bytes_if_divided(arrays, copied)
            if needed is not None and holds(needed.devices):
                return copied
        return None

    def _copy_totals(
        self, arrays: Sequence[AnyArray]
    ) -> dict[str, collections.Counter[jax.Device]]:
        """Returns name of each array to store -> bytes of its copy and those of smaller arrays."""
        leaves = dict(zip(self.names, arrays, strict=True))
        targets = {
            name: _stored_array([leaves[member] for member in group], name in self.plan.stacks)
            for name, group in self.plan.members(self.names).items()
            if not isinstance(leaves[group[0]], np.ndarray)
        }
        sizes = shard_bytes(targets)
        for name, group in self.plan.stacks.items():
            if name in sizes and len(group) > MAX_ARGUMENTS:
                sizes[name] *= 2  # concatenated from smaller stacks
        total: collections.Counter[jax.Device] = collections.Counter()
        totals = {}
        for name in sorted(targets, key=sizes.__getitem__):
            sharding: Any = targets[name].sharding
            total = total + collections.Counter(
                dict.fromkeys(sharding.addressable_devices, sizes[name])
            )
            totals[name] = total
        return totals


def _unless_refused(needed: Callable[[], T]) -> T | None:
    """Returns the result of a function that compiles; None if no device can hold its programs."""
    try:
        return needed()
    except jax.errors.JaxRuntimeError as error:
        if not is_exhausted(error):
            raise
        return None


def _stored_array(members: Sequence[Any], is_stack: bool) -> jax.ShapeDtypeStruct:
    first = members[0]
    if not is_stack:
        return jax.ShapeDtypeStruct(first.shape, first.dtype, sharding=first.sharding)
    shape = (len(members), *first.shape)
    return jax.ShapeDtypeStruct(shape, first.dtype, sharding=stacked(first.sharding))


def _spec(array: AnyArray, *, is_still: bool = False) -> LeafSpec:
    placement = True if isinstance(array, np.ndarray) else stacked(array.sharding)
    return LeafSpec(
        shape=tuple(array.shape),
        dtype=array.dtype.name,
        nbytes=math.prod(array.shape) * array.dtype.itemsize,
        placement=placement,
        on_host=isinstance(array, np.ndarray),
        is_still=is_still,
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


def _unstacked(plan: Plan, leaves: Mapping[str, AnyArray]) -> Plan:
    """Returns the plan without its stacks of device arrays; stacks of host arrays remain."""
    stacks = {
        n: group for n, group in plan.stacks.items() if isinstance(leaves[group[0]], np.ndarray)
    }
    return Plan(stacks, plan.empty)
