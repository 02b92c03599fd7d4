"""Takes snapshots; a snapshot holds the arrays that a save stores while training continues.

JAX arrays are immutable, but a jitted step may donate their buffers, which deletes the arrays. A
snapshot is taken in one of four ways:

- ``reference`` holds the arrays themselves, at no cost. If the program donates an array before the
  save has fetched it, the save fails. The save never stores wrong values, because reading a deleted
  array raises an error.
- ``copy`` enqueues copies on the devices before any later computation. The copies are stacked as
  the storage plan says. The copies cost device memory. Making them does not block the training
  thread.
- ``offload`` enqueues copies into memory of the host, see ``offload.py``. The copies are stacked on
  the host. The copies cost memory of the host, and almost none of the devices. Making them does not
  block the training thread.
- ``transfer`` holds the arrays themselves, and blocks the training thread until the save has
  fetched them.

The mode ``auto`` makes copies at first. At the next save, ``auto`` checks whether the program
donated the arrays that were copied. If the program donated none of them, ``auto`` continues with
references. If a training step then donates an array that a save still holds by reference, that save
fails, and later saves copy. If device memory does not suffice for copies of all arrays, ``auto``
copies the small ones, as many as fit, and offloads the rest. If the host lacks memory for that,
``auto`` uses ``transfer``.

In snapshots by ``reference`` and ``transfer``, the thread of the save stacks the arrays later, on
the devices. If device memory does not suffice for these stacks, the save stores each leaf as a
separate array.

Each process chooses by itself in which way it takes a snapshot, but all processes must stack the
same leaves. After each process has its snapshot, the processes therefore tell each other whether
they lack memory for stacks. The threads of the saves exchange these messages, so that training
never waits for other processes. If one process lacks memory for stacks, no process may stack, but a
process that has already stacked its copies cannot unstack them. In this case the save fails on all
processes, and later saves do not stack.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import jax

from torchax_ckpt.errors import CheckpointError, DonatedBufferError, OutOfMemoryError, SaveError
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.options import Layout, SnapshotMode
from torchax_ckpt.snapshot.device_memory import DeviceMemory, is_exhausted
from torchax_ckpt.snapshot.device_sizes import bytes_on_devices
from torchax_ckpt.snapshot.host_array import HostArray
from torchax_ckpt.snapshot.offload import PINNED, Offloaded, is_supported
from torchax_ckpt.snapshot.planner import Planned, Planner
from torchax_ckpt.snapshot.stacking import AnyArray, Array, execute

logger = logging.getLogger(__name__)

Way = Literal["reference", "copy", "offload", "transfer"]
Stored = Array | HostArray
"""What a save stores: an array on devices, or on the host with or without a sharding."""


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
    _bounds: tuple[frozenset[str], frozenset[str]]
    _planned: Planned | None = None
    _copies: Mapping[str, Array] | None = None
    _offloaded: Offloaded | None = None

    def stored(self, agree: Callable[[bool], bool] = bool) -> tuple[Plan, Mapping[str, Stored]]:
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
        planned = self._planned or self._planner(self.names, self._arrays, *self._bounds)
        plan, flat = planned.plan, planned.flat
        ready = self._stacked(planned) if self._copies is None else self._copies
        # If stacks are taken over beside this snapshot, other processes may have them in theirs.
        is_flat = plan == flat and not self._bounds[0]
        if not agree(ready is None or is_flat):
            assert ready is not None, "this process would have raised its flag"
            return plan, self._complete(plan, ready)
        device_stacks = plan.stacks.keys() - flat.stacks.keys()
        if agree(not device_stacks.isdisjoint(self._copies or ())):
            self._planner.stack_no_more()
            raise SaveError(
                "the save failed: one process has no device memory in which to stack leaves (to "
                "join several leaves into one array), and another process has already stacked the "
                "leaves of this save. From the next save on, leaves are copied and stored one by "
                "one. Save again"
            )
        if plan != flat:
            logger.info(
                "no device memory for stacks: the leaves of this save are stored one by one"
            )
        if self._copies is not None:
            return flat, self._complete(flat, self._copies)
        return flat, execute(flat, self._leaves(), copy=False)

    def _leaves(self) -> dict[str, Array]:
        return dict(zip(self.names, self._arrays, strict=True))

    def _complete(self, plan: Plan, copies: Mapping[str, Array]) -> Mapping[str, Stored]:
        """Adds the offloaded arrays to the others, in an order that is the same in each process."""
        if self._offloaded is None:
            return copies
        try:
            found: dict[str, Stored] = {**self._offloaded.on_host(), **copies}
        except jax.errors.JaxRuntimeError as error:
            if is_exhausted(error):
                self._memory.pinned_failed()
            raise
        return {name: found[name] for name in plan.members(self.names)}

    def _stacked(self, planned: Planned) -> dict[str, Array] | None:
        """Returns the arrays to store, with stacks; None if the devices lack memory for stacks."""
        try:
            if not self._memory.holds(planned.bytes_on_devices(self._arrays, copy=False)):
                return None
            stored = execute(planned.plan, self._leaves(), copy=False)
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
        require_alive(zip(self.names, self._arrays, strict=False))


class Snapshotter:
    """Takes snapshots in one of the ways of the module's docstring, by the rules given there.

    Args:
      mode: see the module's docstring.
      layout: which leaves are stacked.
      memory: the memory of the devices and of the host.
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
        self._exhausted: BaseException | None = None

    def take(
        self, names: Sequence[str], arrays: Sequence[Array], taken: Iterable[str] = ()
    ) -> Snapshot:
        """Returns a snapshot of the leaves.

        The training thread calls this method, which never blocks. For a snapshot by ``transfer``,
        ``Saver.begin`` later blocks the training thread until the save has fetched the arrays.

        Args:
          names: the names of the leaves.
          arrays: the leaves.
          taken: names that no stack of the snapshot may have.

        Raises:
          OutOfMemoryError: the mode is "copy" or "offload", and there is no memory for that.
          SaveError: the mode is "offload", and the devices have no pinned memory.
        """
        bounds = frozenset(taken), self._planner.still
        is_referenced, why = self._is_referenced(names, arrays)
        if is_referenced:
            way: Way = "transfer" if self._mode == "transfer" else "reference"
            self._log_once(way, why)
            return Snapshot(way, names, arrays, self._planner, self._memory, bounds)
        planned = self._planner(names, arrays, *bounds)
        if self._mode != "offload":
            if (snapshot := self._copied(planned, arrays)) is not None:
                self._log_once("copy", why)
                return snapshot
            why = f"{why}, and there is no memory for copies on the devices"
        if self._mode != "copy":
            if (snapshot := self._offloaded(planned, arrays)) is not None:
                self._exhausted = None
                self._log_once("offload", why)
                return snapshot
            why = f"{why}, and the arrays cannot be offloaded"
        exhausted, self._exhausted = self._exhausted, None  # its traceback holds arrays
        if self._mode != "auto":
            raise self._out_of_memory(planned, arrays, exhausted) from exhausted
        self._log_once("transfer", why)
        return Snapshot("transfer", names, arrays, self._planner, self._memory, bounds)

    def chosen(
        self, names: Sequence[str], arrays: Sequence[AnyArray]
    ) -> tuple[Way, Planned, frozenset[str]]:
        """Returns how the mode "auto" takes a snapshot if the program donates; takes none.

        Returns the way, the planned leaves, and the names of the arrays to store that are copied.
        Compiles the programs of the snapshot.

        Args:
          names: the names of the leaves.
          arrays: the leaves; abstract arrays with shardings may stand for arrays on devices.
        """
        planned = self._planner(names, arrays)
        everything = frozenset(planned.plan.members(names))
        if self._may_copy(planned, arrays):
            return "copy", planned, everything
        if (copied := self._division(planned, arrays)) is not None:
            return "offload", planned, copied
        return "transfer", planned, frozenset()

    def keep_apart(self, still: frozenset[str]) -> None:
        """Makes later snapshots stack no leaf in ``still`` with a leaf that is not in it."""
        self._planner.still = still

    def donated(self) -> None:
        """Records that the program donated an array that a snapshot held by reference.

        From then on, the mode ``auto`` makes copies again.
        """
        self._donates = True

    def _is_referenced(self, names: Sequence[str], arrays: Sequence[Array]) -> tuple[bool, str]:
        """Returns whether a snapshot holds the arrays themselves, and why."""
        if self._mode != "auto":
            return self._mode in ("reference", "transfer"), "the options require it"
        if self._donates is None and self._samples:
            self._donates = any(sample.is_deleted() for sample in self._samples)
            self._samples = []
        if self._donates is False:
            return True, "the program does not donate the saved arrays"
        if self._donates is None:
            self._samples = _samples(names, arrays)
            return False, "the next save will show whether the program donates"
        return False, "the program donates the saved arrays"

    def _copied(self, planned: Planned, arrays: Sequence[Array]) -> Snapshot | None:
        """Returns a snapshot by copy; None if the devices lack memory for it."""
        # Without this check, a copy that fits could leave too little memory for the next step. The
        # mode "copy" takes that risk.
        if self._mode == "auto" and not self._may_copy(planned, arrays):
            return None
        leaves = dict(zip(planned.names, arrays, strict=True))
        try:
            copies = execute(planned.plan, leaves, copy=True)
        except jax.errors.JaxRuntimeError as error:
            self._require_exhausted(error)
            return None
        self._memory.took(copies.values())
        return Snapshot(
            "copy", planned.names, (), self._planner, self._memory, planned.bounds, planned, copies
        )

    def _offloaded(self, planned: Planned, arrays: Sequence[Array]) -> Snapshot | None:
        """Returns a snapshot by offload; None if the devices or the host lack memory for it."""
        if (copied := self._division(planned, arrays)) is None:
            return None
        plan, leaves, others = planned.divided(arrays, copied)
        needed = planned.bytes_if_divided(arrays, copied)
        assert needed is not None, "chosen because it fits"
        taken = self._memory.promised(needed)
        try:
            copies = execute(plan, leaves, copy=True)
            offloaded = Offloaded(planned.plan, others, taken)
        except BaseException as error:
            taken()
            if not isinstance(error, jax.errors.JaxRuntimeError):
                raise
            self._require_exhausted(error)
            return None
        self._memory.took(copies.values())
        return Snapshot(
            "offload",
            planned.names,
            (),
            self._planner,
            self._memory,
            planned.bounds,
            planned,
            copies,
            offloaded,
        )

    def _may_copy(self, planned: Planned, arrays: Sequence[AnyArray]) -> bool:
        """Returns whether the devices have memory for copies while the next step runs."""
        return self._memory.holds(planned.bytes_on_devices(arrays, copy=True))

    def _division(self, planned: Planned, arrays: Sequence[AnyArray]) -> frozenset[str] | None:
        """Returns which arrays a snapshot by offload copies on devices; None if it cannot be taken.

        In the mode "auto", these are as many as fit; in the mode "offload", none.
        """
        if not is_supported(arrays):
            return None
        copied: frozenset[str] | None = frozenset()
        if self._mode == "auto":
            if self._memory.has_pinned_failed:
                return None
            copied = planned.division(arrays, self._memory.holds)
        needed = None if copied is None else planned.bytes_if_divided(arrays, copied)
        return copied if needed is not None and self._memory.host_holds(needed) else None

    def _require_exhausted(self, error: jax.errors.JaxRuntimeError) -> None:
        """Records that the devices ran out of memory; raises ``error`` if it says anything else."""
        if not is_exhausted(error):
            raise error
        self._exhausted = error
        self._memory.failed()

    def _out_of_memory(
        self, planned: Planned, arrays: Sequence[Array], exhausted: BaseException | None
    ) -> CheckpointError:
        """Returns the error of the modes "copy" and "offload"; ``exhausted`` is JAX's error."""
        nothing = "Nothing was saved, and the state is unchanged."
        if self._mode == "copy":
            return OutOfMemoryError(
                "no device memory for copies of the state: "
                f"{self._memory.described(bytes_on_devices(arrays))}. {nothing} Use "
                'CheckpointOptions(snapshot="auto"), which moves the state to the host in this '
                "case, or shard the state over more devices."
            )
        if not is_supported(arrays):
            return SaveError(
                f'snapshot="offload": expected devices with memory of the kind {PINNED!r}, found '
                f'devices without it. {nothing} Use CheckpointOptions(snapshot="auto").'
            )
        needed = planned.bytes_if_divided(arrays, frozenset())
        if needed is None:
            found = "the programs that offload it need more memory than a device has"
        elif exhausted is not None:
            found = "the devices ran out of memory while it was offloaded"
        else:
            found = self._memory.described_on_host(needed)
        return OutOfMemoryError(
            f"no memory to offload the state: {found}. {nothing} Use "
            'CheckpointOptions(snapshot="transfer"), which blocks the training thread but needs '
            "less memory, or spread the state over more hosts."
        )

    def _log_once(self, way: Way, why: str) -> None:
        """Logs ``way`` and ``why``, unless this way was logged with this reason before."""
        if (way, why) not in self._logged:
            self._logged.add((way, why))
            logger.info("snapshots are taken by %s: %s", way, why)


def require_alive(leaves: Iterable[tuple[str, Array]]) -> None:
    """Raises DonatedBufferError if one of these leaves, names and arrays, is deleted."""
    for name, array in leaves:
        if isinstance(array, jax.Array) and array.is_deleted():
            raise DonatedBufferError(
                f"{name}: its buffer was donated or deleted before it could be saved. Use "
                'CheckpointOptions(snapshot="copy"), or "auto", for programs that donate.',
                key_path=name,
            )


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
