"""Takes snapshots; a snapshot holds the arrays that a save stores while training continues.

JAX arrays are immutable, but a jitted step may donate their buffers, which deletes the arrays. A
snapshot is taken in one of three ways:

- ``reference`` holds the arrays themselves, at no cost. If the program donates an array before the
  save has fetched it, the save fails. The save never stores wrong values, because reading a deleted
  array raises an error.
- ``copy`` enqueues copies on the devices before any later computation. The copies are stacked as
  the storage plan says. The copies cost device memory. Making them does not block the training
  thread.
- ``transfer`` holds the arrays themselves, and blocks the training thread until the save has
  fetched them.

The mode ``auto`` makes copies at first. At the next save, ``auto`` checks whether the program
donated the arrays that were copied. If the program donated none of them, ``auto`` continues with
references. If a training step then donates an array that a save still holds by reference, that save
fails, and later saves copy. If device memory does not suffice for copies, ``auto`` uses
``transfer``.

In snapshots by ``reference`` and ``transfer``, the thread of the save stacks the arrays later, on
the devices. If device memory does not suffice for these stacks, the save stores each leaf as a
separate array.

Each process chooses by itself whether it takes a snapshot by reference, copy or transfer, but all
processes must stack the same leaves. After each process has its snapshot, the processes therefore
tell each other whether they lack memory for stacks. The threads of the saves exchange these
messages, so that training never waits for other processes. If one process lacks memory for stacks,
no process may stack, but a process that has already stacked its copies cannot unstack them. In this
case the save fails on all processes, and later saves do not stack.
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
from torchax_ckpt.snapshot.device_sizes import bytes_on_devices
from torchax_ckpt.snapshot.planner import Planned, Planner, unstacked
from torchax_ckpt.snapshot.stacking import Array, execute

logger = logging.getLogger(__name__)

Way = Literal["reference", "copy", "transfer"]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The leaves that one save stores, as they were when the snapshot was taken.

    Attributes:
      way: how the snapshot was taken.
      names: the names of the leaves.
    """

    way: Way
    names: Sequence[str]
    _arrays: Sequence[Array]
    _planner: Planner
    _memory: DeviceMemory
    _ready: tuple[Plan, Mapping[str, Array]] | None = None

    def stored(self, agree: Callable[[bool], bool] = bool) -> tuple[Plan, Mapping[str, Array]]:
        """Returns the storage plan, and a dict from stored name to the array to store.

        Any thread may call this method.

        Args:
          agree: takes the flag of this process and returns True if the flag is set on any process
            that stores the same arrays.

        Raises:
          DonatedBufferError: an array held by reference was donated or deleted.
          SaveError: some processes have stacks already, and others have no memory for stacks. From
            the next snapshot on, no process makes stacks.
        """
        leaves: Mapping[str, Array]
        stored: Mapping[str, Array] | None
        if self._ready is not None:
            plan, stored = self._ready
            leaves = stored
        else:
            planned = self._planner.planned(self.names, self._arrays)
            plan = planned.plan
            leaves = dict(zip(self.names, self._arrays, strict=True))
            stored = self._stacked(planned, leaves)
        flat = unstacked(plan, leaves)
        is_flat = agree(stored is None or plan == flat)
        if not is_flat and stored is not None:
            return plan, stored
        if agree(self._ready is not None and plan != flat):
            self._planner.stack_no_more()
            raise SaveError(
                "the save failed: one process has no device memory in which to stack leaves (to "
                "join several leaves into one array), and another process has already stacked the "
                "leaves of this save. From the next save on, leaves are copied and stored one by "
                "one. Save again"
            )
        if stored is not None and plan == flat:
            return plan, stored
        logger.info("no device memory for stacks: the leaves of this save are stored one by one")
        return flat, execute(flat, leaves, copy=False)

    def _stacked(self, planned: Planned, leaves: Mapping[str, Array]) -> dict[str, Array] | None:
        """Returns the arrays to store, with stacks; None if the devices lack memory for stacks."""
        try:
            if not self._memory.holds(planned.bytes_on_devices(self._arrays, copy=False)):
                return None
            stored = execute(planned.plan, leaves, copy=False)
        # For a deleted array JAX raises ValueError from a jitted call and RuntimeError elsewhere.
        except Exception as error:
            self.require_alive()
            if not is_exhausted(error):
                raise
            self._memory.failed()
            return None
        self._memory.took(stored[name] for name in planned.plan.stacks)
        return stored

    def require_alive(self) -> None:
        """Raises DonatedBufferError if an array that the snapshot holds by reference is deleted."""
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
    """Takes snapshots by reference, copy or transfer, by the rules in the module's docstring.

    Args:
      mode: see the module's docstring.
      layout: which leaves are stacked.
      memory: the memory of the devices.
    """

    def __init__(
        self, mode: SnapshotMode, layout: Layout, memory: DeviceMemory | None = None
    ) -> None:
        self._mode = mode
        self._planner = Planner(layout)
        self._memory = memory or DeviceMemory()
        self._donates: bool | None = None
        self._samples: list[jax.Array] = []
        self._logged: set[tuple[Way, str]] = set()

    def take(self, names: Sequence[str], arrays: Sequence[Array]) -> Snapshot:
        """Returns a snapshot of the leaves.

        The training thread calls this method, which never blocks. For a snapshot by ``transfer``,
        ``Saver.begin`` later blocks the training thread until the save has fetched the arrays.

        Raises:
          OutOfMemoryError: the mode is "copy", and the devices have no memory for copies.
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
                    needed = bytes_on_devices(arrays)
                    raise OutOfMemoryError(
                        "no device memory for copies of the state: "
                        f"{self._memory.described(needed)}. Nothing was saved, and the state is "
                        'unchanged. Use CheckpointOptions(snapshot="auto"), which transfers the '
                        "state to the host in this case, or shard the state over more devices."
                    ) from error
            way, why = "transfer", "the devices ran out of memory for copies"
        self._log_once(way, why)
        return Snapshot(way, names, arrays, self._planner, self._memory)

    def donated(self) -> None:
        """Records that the program donated an array that a snapshot held by reference.

        From then on, the mode ``auto`` makes copies again.
        """
        self._donates = True

    def _copied(self, names: Sequence[str], arrays: Sequence[Array], why: str) -> Snapshot:
        plan = self._planner(names, arrays)
        ready = execute(plan, dict(zip(names, arrays, strict=True)), copy=True)
        self._memory.took(ready.values())
        self._log_once("copy", why)
        return Snapshot("copy", names, (), self._planner, self._memory, (plan, ready))

    def _way(self, names: Sequence[str], arrays: Sequence[Array]) -> tuple[Way, str]:
        """Returns the way to take a snapshot, such as ``copy``, and why this way was chosen."""
        if self._mode != "auto":
            return self._mode, "the options require it"
        if self._donates is None and self._samples:
            self._donates = any(sample.is_deleted() for sample in self._samples)
            self._samples = []
        if self._donates is False:
            return "reference", "the program does not donate the saved arrays"
        if self._donates is None:
            self._samples = _samples(names, arrays)
            why = "the next save will show whether the program donates"
        else:
            why = "the program donates the saved arrays"
        planned = self._planner.planned(names, arrays)
        if self._memory.holds(planned.bytes_on_devices(arrays, copy=True)):
            return "copy", why
        return "transfer", f"{why}, and there is no memory for copies"

    def _log_once(self, way: Way, why: str) -> None:
        """Logs ``way`` and ``why``, unless this way was logged with this reason before."""
        if (way, why) not in self._logged:
            self._logged.add((way, why))
            logger.info("snapshots are taken by %s: %s", way, why)


def _samples(names: Sequence[str], arrays: Sequence[Array]) -> list[jax.Array]:
    """Returns the smallest device array of each part of the state.

    A part is a component (``model``, ``optimizer``, ...) or a top-level entry of the functional
    state. One array per part suffices, because a training step is assumed to donate all arrays of a
    part or none.
    """
    smallest: dict[tuple[str, ...], jax.Array] = {}
    for name, array in zip(names, arrays, strict=True):
        if isinstance(array, jax.Array):
            component, _, rest = name.partition("/")
            part = (component, rest.partition("/")[0]) if component == "state" else (component,)
            if part not in smallest or array.size < smallest[part].size:
                smallest[part] = array
    return list(smallest.values())
