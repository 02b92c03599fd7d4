"""Owns what memory the devices have left, for copies beside the step that runs meanwhile."""

from __future__ import annotations

import collections
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Sharding

Stats = Callable[[jax.Device], "Mapping[str, int] | None"]

# Room that copies must leave on a device for the step that runs meanwhile.
_HEADROOM = 1.25


def memory_stats(device: jax.Device) -> Mapping[str, int] | None:
    """What the device says of its memory; None if it says nothing, as CPUs do."""
    return device.memory_stats()


def free_device_bytes(device: jax.Device, stats: Stats = memory_stats) -> int | None:
    """Free memory of a device in bytes: what its peak so far has left over, or the host's.

    The peak counts, not what is in use between two steps: the next step needs its room again.
    """
    beside_peak = _free_beside_peak(stats(device))
    if beside_peak is None and device.platform == "cpu":
        return _available_host_bytes()
    return beside_peak


def _free_beside_peak(said: Mapping[str, int] | None) -> int | None:
    if not said or "bytes_limit" not in said or "bytes_in_use" not in said:
        return None
    return said["bytes_limit"] - said.get("peak_bytes_in_use", said["bytes_in_use"])


def is_exhausted(error: BaseException) -> bool:
    """Whether this is how JAX says that a device has no memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


class DeviceMemory:
    """Says whether copies fit on the devices; is told of those that were made.

    A peak never falls, and holds the copies of earlier saves. By as much as they take, what it has
    risen since the first of them counts as theirs, and as free again once they are gone. While any
    are not, as those of a save to another tier, and once memory was exhausted, the whole peak
    counts. May be used by several threads.

    Args:
      stats: what a device says of its memory.
    """

    def __init__(self, stats: Stats = memory_stats) -> None:
        self._stats = stats
        self._lock = threading.Lock()
        # By device: what the program leaves free, and the most that was copied at one time.
        self._left: dict[jax.Device, int] = {}
        self._copied: dict[jax.Device, int] = {}
        self._copies: list[weakref.ref[Any]] = []
        self._has_failed = False

    def holds(self, arrays: Iterable[Any]) -> bool:
        """Whether the devices have memory for copies of those arrays that are on devices."""
        needed = _bytes_on_devices(arrays)
        with self._lock:
            return all(
                (free := self._free(device, len(needed))) is None or num_bytes * _HEADROOM <= free
                for device, num_bytes in needed.items()
            )

    def took(self, copies: Iterable[Any]) -> None:
        """Tells that copies, which come and go together, were made."""
        on_devices = [copy for copy in copies if isinstance(copy, jax.Array)]
        if not on_devices:
            return
        with self._lock:
            for device, num_bytes in _bytes_on_devices(on_devices).items():
                self._copied[device] = max(num_bytes, self._copied.get(device, 0))
            self._drop_what_went()  # else their list would grow with every save
            self._copies.append(weakref.ref(on_devices[0]))

    def failed(self) -> None:
        """Tells that memory did not suffice after all."""
        with self._lock:
            self._has_failed = True

    def _free(self, device: jax.Device, count: int) -> int | None:
        """What is left on one of so many devices."""
        beside_peak = _free_beside_peak(self._stats(device))
        if beside_peak is None:
            free = free_device_bytes(device, self._stats)
            return None if free is None else free // count  # of the host, which all share
        most = beside_peak + self._copied.get(device, 0)
        self._left[device] = max(beside_peak, min(self._left.get(device, beside_peak), most))
        self._drop_what_went()
        return beside_peak if self._copies or self._has_failed else self._left[device]

    def _drop_what_went(self) -> None:
        self._copies = [copy for copy in self._copies if copy() is not None]


def _bytes_on_devices(arrays: Iterable[Any]) -> dict[jax.Device, int]:
    """What the arrays take of each device of this process."""
    by_sharding: dict[Sharding, int] = collections.defaultdict(int)
    for array in arrays:
        if isinstance(array, jax.Array):
            shape = array.sharding.shard_shape(array.shape)
            by_sharding[array.sharding] += math.prod(shape) * array.dtype.itemsize
    needed: dict[jax.Device, int] = collections.defaultdict(int)
    for sharding, num_bytes in by_sharding.items():
        for device in sharding.addressable_devices:
            needed[device] += num_bytes
    return needed


def _available_host_bytes() -> int | None:
    """What Linux says can be allocated, file caches that it would give up included."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return None
