"""Takes snapshots; a snapshot holds the arrays that a save stores while training continues.

JAX arrays are immutable, but a jitted step may donate their buffers, which deletes the arrays. A
snapshot is taken in one of four ways:

- ``reference`` holds the arrays themselves. If the program donates one before the save has fetched
  it, the save fails, but never stores wrong values: reading a deleted array raises an error.
- ``copy`` enqueues copies on the devices before any later computation, stacked as the storage plan
  says. They cost device memory.
- ``offload`` enqueues copies into memory of the host, see ``offload.py``, where they are stacked.
- ``transfer`` holds the arrays themselves, and blocks the training thread until they are fetched.

The mode ``auto`` makes copies at first, and references from the next save on if the program has not
donated the copied arrays. If a step then donates a referenced array, later saves copy. If device
memory does not suffice for copies, ``auto`` offloads, and if the host lacks memory, it transfers.

In snapshots by ``reference`` and ``transfer``, the thread of the save stacks the arrays later: on
the devices, or on the host if one CPU device has each array or the devices lack the memory. Each
process chooses by itself, because what is stored does not depend on it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax

from torchax_ckpt.devices.device_memory import DeviceMemory, is_exhausted
from torchax_ckpt.devices.device_sizes import bytes_on_devices
from torchax_ckpt.devices.host_array import HostArray
from torchax_ckpt.errors import DonatedBufferError, OutOfMemoryError, SaveError
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.options import Layout, SnapshotMode
from torchax_ckpt.runtime.stages import stage
from torchax_ckpt.snapshot.offload import PINNED, Offloaded, is_supported
from torchax_ckpt.snapshot.planner import Planner, SnapshotPlan, Way
from torchax_ckpt.snapshot.stacking import Array, MaybeAbstract, await_on_cpus, execute

logger = logging.getLogger(__name__)

Stored = Array | HostArray
"""What a save stores: an array on devices, or on the host with or without a sharding."""

ToStore = tuple[Plan, Mapping[str, Stored]]
"""The storage plan, and a dict from stored name to the array to store."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The leaves that one save stores, as they were when the snapshot was taken.

    ``arrays`` are those that it holds by reference, all or none.
    """

    way: Way
    names: Sequence[str]
    arrays: Sequence[Array]
    make: Callable[[], ToStore]

    @stage("stack the arrays")
    def to_store(self) -> ToStore:
        """Returns what to store, on any thread; DonatedBufferError if a reference was donated."""
        return self.make()

    def require_alive(self) -> None:
        """Raises DonatedBufferError if an array that the snapshot holds by reference is deleted."""
        require_alive(zip(self.names, self.arrays, strict=False))


def stacks_on_host(arrays: Iterable[Array]) -> bool:
    """Returns whether numpy makes the stacks: if all arrays are on CPU devices of this process.

    If two threads start programs over several CPU devices at the same time, each may wait for ever
    for threads of XLA's that the other has taken (jaxlib 0.10.2: JAX alone does within minutes on a
    busy machine). Training starts such programs, so the thread of a save must not.
    """
    shardings = {array.sharding for array in arrays if isinstance(array, jax.Array)}
    devices: set[Any] = {device for sharding in shardings for device in sharding.device_set}
    is_here = all(sharding.is_fully_addressable for sharding in shardings)
    return is_here and all(device.platform == "cpu" for device in devices)


def way_if_donated(
    plan: SnapshotPlan, arrays: Sequence[MaybeAbstract], memory: DeviceMemory
) -> Way:
    """Returns how "auto" takes a snapshot if the program donates; arrays may be abstract."""
    return next(way for way in _WAYS_IF_DONATED if _fits(way, plan, arrays, memory))


_WAYS_IF_DONATED: tuple[Way, ...] = ("copy", "offload", "transfer")


def _fits(
    way: Way, plan: SnapshotPlan, arrays: Sequence[MaybeAbstract], memory: DeviceMemory
) -> bool:
    """Returns whether there is memory for a snapshot while the next step runs."""
    if way == "transfer":
        return True
    if way == "offload" and not (memory.may_offload and is_supported(arrays)):
        return False
    needed = plan.needed(way, arrays)
    if needed is None or not memory.holds(needed.devices):
        return False
    return way == "copy" or memory.host_holds(needed)


class Snapshotter:
    """Takes snapshots in one of the ways of the module's docstring, by the rules given there."""

    def __init__(
        self, mode: SnapshotMode, layout: Layout, memory: DeviceMemory | None = None
    ) -> None:
        self._mode = mode
        self._planner = Planner(layout)
        self._memory = memory or DeviceMemory()
        self._donates: bool | None = None
        self._samples: list[jax.Array] = []
        self._logged: set[tuple[Way, str]] = set()

    @stage("take the snapshot")
    def take(
        self,
        names: Sequence[str],
        arrays: Sequence[Array],
        reserved: Iterable[str] = (),
        frozen: frozenset[str] = frozenset(),
    ) -> Snapshot:
        """Returns a snapshot of the leaves, without blocking but for ``await_on_cpus``.

        No stack gets a ``reserved`` name, or has ``frozen`` leaves beside others. If the snapshot
        is taken by ``transfer``, ``Saver.begin`` later blocks the training thread. Raises
        OutOfMemoryError or SaveError if the mode is "copy" or "offload", and memory is lacking.
        """
        planned = partial(self._planner, names, arrays, frozenset(reserved), frozen)
        ways, why = self._ways(names, arrays)
        for way in ways:
            held = arrays
            make: Callable[[], ToStore] | None = partial(self._stacked, way, planned, arrays)
            if way == "copy" or way == "offload":
                held, make = (), self._copied(way, planned(), arrays)
            if make is None:
                why += _LACKING[way]
                continue
            if (way, why) not in self._logged:
                self._logged.add((way, why))
                logger.debug("snapshots are taken by %s: %s", way, why)
            return Snapshot(way, names, held, make)
        raise AssertionError("a transfer needs no memory")

    def donated(self) -> None:
        """Records that the program donated an array held by reference: ``auto`` then copies."""
        self._donates = True

    def _ways(self, names: Sequence[str], arrays: Sequence[Array]) -> tuple[Sequence[Way], str]:
        """Returns the ways to try, and why."""
        if self._mode != "auto":
            return (self._mode,), "the options require it"
        if self._donates is None and self._samples:
            self._donates = any(sample.is_deleted() for sample in self._samples)
            self._samples = []
        if self._donates is False:
            return ("reference",), "the program does not donate the saved arrays"
        if self._donates is None:
            self._samples = _samples(names, arrays)
            return _WAYS_IF_DONATED, "the next save will show whether the program donates"
        return _WAYS_IF_DONATED, "the program donates the saved arrays"

    def _stacked(
        self, way: Way, planned: Callable[[], SnapshotPlan], arrays: Sequence[Array]
    ) -> ToStore:
        """Stacks referenced arrays on the devices; on the host if these are CPUs or lack memory."""
        plan, memory = planned(), self._memory
        leaves = dict(zip(plan.names, arrays, strict=True))
        if not stacks_on_host(arrays):
            try:
                needed = plan.needed(way, arrays)
                if needed is not None and memory.holds(needed.devices):
                    stored = execute(plan.plan, leaves, copy=False)
                    memory.record_copies(stored[name] for name in plan.plan.stacks)
                    return plan.plan, stored
            # For a deleted array, JAX raises ValueError in a jitted call, else RuntimeError.
            except Exception as error:
                require_alive(leaves.items())
                if not is_exhausted(error):
                    raise
                memory.record_failure()
            logger.debug("no device memory for stacks: the leaves are stacked on the host")
        return plan.plan, execute(plan.plan, leaves, copy=False, on_host=True)

    def _copied(
        self, way: Literal["copy", "offload"], plan: SnapshotPlan, arrays: Sequence[Array]
    ) -> Callable[[], ToStore] | None:
        """Copies or offloads the leaves; returns None if the mode "auto" shall try the next way."""
        # The mode "copy" takes the risk that copies leave too little memory for the next step.
        if self._mode == "offload":
            self._require_host_memory(plan, arrays)
        elif self._mode == "auto" and not _fits(way, plan, arrays, self._memory):
            return None
        leaves = dict(zip(plan.names, arrays, strict=True))
        await_on_cpus(arrays)
        try:
            if way == "copy":
                copies = execute(plan.plan, leaves, copy=True)
                self._memory.record_copies(copies.values())
                return lambda: (plan.plan, copies)
            on_devices, on_host = plan.divided(leaves)
            needed = plan.needed("offload", arrays)
            assert needed is not None, "it fits"
            offloaded = Offloaded(plan.plan, on_devices, self._memory, needed)
            host_arrays = execute(plan.plan, on_host, copy=False)

            def stored() -> ToStore:
                by_name: dict[str, Stored] = {**offloaded.fetched(), **host_arrays}
                # In an order that is the same in each process.
                return plan.plan, {name: by_name[name] for name in plan.plan.members(plan.names)}

            return stored
        except Exception as error:
            require_alive(leaves.items())
            if not is_exhausted(error):
                raise
            self._memory.record_failure()
            if self._mode == "auto":
                return None
            if way == "offload":
                found = "the devices ran out of memory while it was offloaded"
                raise _no_host_memory(found) from error
            raise OutOfMemoryError(
                "no device memory for copies of the state: "
                f"{self._memory.shortage(bytes_on_devices(arrays))}. {_UNCHANGED} Use "
                'CheckpointOptions(snapshot="auto"), which moves the state to the host in this '
                "case, or shard the state over more devices."
            ) from error

    def _require_host_memory(self, plan: SnapshotPlan, arrays: Sequence[Array]) -> None:
        """Raises the errors of the mode "offload" before anything is offloaded."""
        if not is_supported(arrays):
            raise SaveError(
                'snapshot="offload": expected devices that can copy to memory of the kind '
                f"{PINNED!r}, found devices that cannot. {_UNCHANGED} "
                'Use CheckpointOptions(snapshot="auto").'
            )
        needed = plan.needed("offload", arrays)
        if needed is None:
            raise _no_host_memory("the programs that offload it need more memory than a device has")
        if not self._memory.host_holds(needed):
            found = self._memory.available_on_host()
            said = (
                f"expected {needed.host_bytes} bytes of host memory available, found {found} bytes"
            )
            raise _no_host_memory(said)


_LACKING = {
    "copy": ", and there is no memory for copies on the devices",
    "offload": ", and the arrays cannot be offloaded",
}
_UNCHANGED = "Nothing was saved, and the state is unchanged."


def _no_host_memory(found: str) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"no memory to offload the state: {found}. {_UNCHANGED} Use "
        'CheckpointOptions(snapshot="transfer"), which blocks the training thread but needs '
        "less memory, or spread the state over more hosts."
    )


def require_alive(leaves: Iterable[tuple[str, Array]]) -> None:
    """Raises DonatedBufferError if one of these leaves, names and arrays, is deleted."""
    for name, array in leaves:
        if isinstance(array, jax.Array) and array.is_deleted():
            raise DonatedBufferError(
                f"{name}: its buffer was donated or deleted before it could be saved. Use "
                'CheckpointOptions(snapshot="copy") for programs that donate, or "auto" if they do '
                "at every step.",
                key_path=name,
            )


def _samples(names: Sequence[str], arrays: Sequence[Array]) -> list[jax.Array]:
    """Returns the smallest device array of each component or top-level entry of ``state``.

    A training step is assumed to donate all arrays of such a part or none.
    """
    smallest: dict[tuple[str, ...], jax.Array] = {}
    for name, array in zip(names, arrays, strict=True):
        if isinstance(array, jax.Array):
            component, _, rest = name.partition("/")
            part = (component, rest.partition("/")[0]) if component == "state" else (component,)
            if part not in smallest or array.size < smallest[part].size:
                smallest[part] = array
    return list(smallest.values())
