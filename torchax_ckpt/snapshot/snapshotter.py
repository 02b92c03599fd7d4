"""Owns the moment: what a save holds on to while training goes on, and what may happen after.

JAX arrays cannot change, but a jitted step may donate them, and then they are gone. A snapshot is
taken in one of three ways:

    reference  holds the arrays themselves, which costs nothing; an array that is donated before it
               was fetched fails the save, since reading a deleted array raises and never lies.
    copy       copies on the devices, enqueued before anything that follows, stacked on the way as
               the plan says. Costs device memory, and waits for nothing.
    transfer   holds the arrays themselves, and the training thread until they were fetched.

``auto`` copies at first, looks at the next save whether the program had donated what was copied,
and goes on with references if not. Should a later step donate after all, that one save fails, and
copies are taken from then on. Where memory does not suffice for copies it transfers.

Whatever is not copied at once is stacked on the devices later, on the save's own thread. Where
memory does not suffice for that either, the leaves of that save are stored one by one.

Each of several processes takes its snapshots in its own way, but what they store is laid out alike.
Whether one of them has no memory for stacks they ask when each has its snapshot, on the saves' own
threads, so that nobody waits for others in training. Who has copied stacks by then cannot undo it:
that save fails, on all of them, and from then on none of them stacks.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax

from torchax_ckpt.errors import DonatedBufferError, OutOfMemoryError, SaveError
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.options import Layout, SnapshotMode
from torchax_ckpt.snapshot.device_memory import DeviceMemory, is_exhausted
from torchax_ckpt.snapshot.stacking import Array, Planner, execute, unstacked

logger = logging.getLogger(__name__)

Way = Literal["reference", "copy", "transfer"]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The leaves of one save at one moment.

    Attributes:
      way: how it was taken.
      names: of the leaves.
    """

    way: Way
    names: Sequence[str]
    _arrays: Sequence[Array]
    _planner: Planner
    _memory: DeviceMemory
    _ready: tuple[Plan, Mapping[str, Array]] | None = None

    def stored(self, agree: Callable[[bool], bool] = bool) -> tuple[Plan, Mapping[str, Array]]:
        """The plan, and the arrays to store by stored name. May be called on any thread.

        Args:
          agree: from whether something is so on this process, to whether it is on any that stores
            the same arrays.

        Raises:
          DonatedBufferError: a reference was donated or deleted meanwhile.
          SaveError: some processes have stacks already, and others no memory for any. From the
            next snapshot on none makes stacks.
        """
        leaves: Mapping[str, Array]
        stored: Mapping[str, Array] | None
        if self._ready is not None:
            plan, stored = self._ready
            leaves = stored
        else:
            plan = self._planner(self.names, self._arrays)
            leaves = dict(zip(self.names, self._arrays, strict=True))
            stored = self._stacked(plan, leaves)
        flat = unstacked(plan, leaves)
        is_flat = agree(stored is None or plan == flat)
        if not is_flat and stored is not None:
            return plan, stored
        if agree(self._ready is not None and plan != flat):
            self._planner.stack_no_more()
            raise SaveError(
                "the devices of a process have no memory for stacks, and another has copied stacks "
                "already. From the next save on leaves are copied and stored one by one"
            )
        if stored is not None and plan == flat:
            return plan, stored
        logger.info("no device memory for stacks: the leaves of this save are stored one by one")
        return flat, execute(flat, leaves, copy=False)

    def _stacked(self, plan: Plan, leaves: Mapping[str, Array]) -> dict[str, Array] | None:
        """The arrays to store; None where the devices have no memory for the stacks among them."""
        members = (leaves[member] for group in plan.stacks.values() for member in group)
        if not self._memory.holds(members):
            return None
        try:
            stored = execute(plan, leaves, copy=False)
        except Exception as error:  # of a jitted call JAX raises ValueError, of others RuntimeError
            self.require_alive()
            if not is_exhausted(error):
                raise
            self._memory.failed()
            return None
        self._memory.took(stored[name] for name in plan.stacks)
        return stored

    def require_alive(self) -> None:
        """Raises DonatedBufferError, with its name, if an array held by reference is gone."""
        if self._ready is not None:
            return
        for name, array in zip(self.names, self._arrays, strict=True):
            if isinstance(array, jax.Array) and array.is_deleted():
                raise DonatedBufferError(
                    f"{name}: its buffer was donated or deleted before it could be saved. Use "
                    'CheckpointOptions(snapshot="copy"), or "auto", for programs that donate.',
                    key_path=name,
                )


class Snapshotter:
    """Takes snapshots, each in the way that the mode and the program call for.

    Args:
      mode: see the module's docstring.
      layout: which leaves are stacked.
      memory: what there is on the devices.
    """

    def __init__(
        self, mode: SnapshotMode, layout: Layout, memory: DeviceMemory | None = None
    ) -> None:
        self._mode = mode
        self._planner = Planner(layout)
        self._memory = memory or DeviceMemory()
        self._donates: bool | None = None
        self._samples: list[jax.Array] = []
        self._told: set[tuple[Way, str]] = set()

    def take(self, names: Sequence[str], arrays: Sequence[Array]) -> Snapshot:
        """A snapshot of the leaves. Runs on the training thread; waits for nothing.

        Raises:
          OutOfMemoryError: the mode is "copy", and the devices have no memory for that.
        """
        way, why = self._way(names, arrays)
        if way == "copy":
            try:
                return self._copied(names, arrays, why)
            except jax.errors.JaxRuntimeError as error:
                if not is_exhausted(error):
                    raise
                self._memory.failed()
                if self._mode != "auto":
                    raise OutOfMemoryError(
                        "no device memory for copies of what is to be saved: "
                        f"{self._memory.described(arrays)}. Nothing was saved, and what is being "
                        'trained is as it was. Use CheckpointOptions(snapshot="auto"), which '
                        "transfers such a save, or a state sharded over more devices."
                    ) from error
            way, why = "transfer", "the devices ran out of memory for copies"
        self._tell(way, why)
        return Snapshot(way, names, arrays, self._planner, self._memory)

    def donated(self) -> None:
        """Tells that a reference was donated: from now on copies are taken."""
        self._donates = True

    def _copied(self, names: Sequence[str], arrays: Sequence[Array], why: str) -> Snapshot:
        plan = self._planner(names, arrays)
        ready = execute(plan, dict(zip(names, arrays, strict=True)), copy=True)
        self._memory.took(ready.values())
        self._tell("copy", why)
        return Snapshot("copy", names, (), self._planner, self._memory, (plan, ready))

    def _way(self, names: Sequence[str], arrays: Sequence[Array]) -> tuple[Way, str]:
        """How to take a snapshot, and why so."""
        if self._mode != "auto":
            return self._mode, "the options say so"
        if self._donates is None and self._samples:
            self._donates = any(sample.is_deleted() for sample in self._samples)
            self._samples = []
        if self._donates is False:
            return "reference", "the program donates nothing that is saved"
        if self._donates is None:
            self._samples = _samples(names, arrays)
            why = "the next save will show whether the program donates"
        else:
            why = "the program donates what is saved"
        if self._memory.holds(arrays):
            return "copy", why
        return "transfer", f"{why}, and there is no memory for copies"

    def _tell(self, way: Way, why: str) -> None:
        """Says it once."""
        if (way, why) not in self._told:
            self._told.add((way, why))
            logger.info("snapshots are taken by %s: %s", way, why)


def _samples(names: Sequence[str], arrays: Sequence[Array]) -> list[jax.Array]:
    """The smallest device array of every part that a step would donate as a whole."""
    smallest: dict[tuple[str, ...], jax.Array] = {}
    for name, array in zip(names, arrays, strict=True):
        if isinstance(array, jax.Array):
            component, _, rest = name.partition("/")
            part = (component, rest.partition("/")[0]) if component == "state" else (component,)
            if part not in smallest or array.size < smallest[part].size:
                smallest[part] = array
    return list(smallest.values())
