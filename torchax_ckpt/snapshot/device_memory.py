"""The memory that devices have left for copies beside the step that runs meanwhile."""

from __future__ import annotations

import collections
import functools
import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Sharding

from torchax_ckpt.runtime import host_memory

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
        return host_memory.available_host_bytes()
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

    A peak never falls, and holds the copies of earlier saves. So this keeps account of what the
    program itself can have needed at most: of a peak that was reached while there were copies, what
    is beyond them; of one that was reached while there were none, all of it. To tell them apart it
    looks when copies are made, and once more when they go. Once memory was exhausted, the whole
    peak counts.

    What it cannot see is that the program has come to need more between two saves, but no more than
    it and the copies had needed together: no device says so. May be used by several threads.

    Args:
      stats: what a device says of its memory.
    """

    def __init__(self, stats: Stats = memory_stats) -> None:
        self._stats = stats
        # Copies may go, and be accounted for, wherever Python collects garbage: also in here.
        self._lock = threading.RLock()
        # By device, in bytes: the program's own peak at most, the whole peak when last looked at,
        # and copies that are there.
        self._own: dict[jax.Device, int] = {}
        self._seen: dict[jax.Device, int] = {}
        self._copied: collections.Counter[jax.Device] = collections.Counter()
        self._has_failed = False

    def holds(self, arrays: Iterable[Any]) -> bool:
        """Whether the devices have memory for copies of those arrays that are on devices."""
        needed = _bytes_on_devices(arrays)
        with self._lock:
            free = self._free_of_each(needed)
            return all(
                (left := free[device]) is None or num_bytes * _HEADROOM <= left
                for device, num_bytes in needed.items()
            )

    def described(self, arrays: Iterable[Any]) -> str:
        """What copies of arrays need of the device with least to spare, and what it has free."""
        needed = _bytes_on_devices(arrays)
        with self._lock:
            free = self._free_of_each(needed)
        short = min(needed, key=lambda d: math.inf if (f := free[d]) is None else f - needed[d])
        found = "unknown" if free[short] is None else f"{free[short]} bytes"
        return (
            f"{short}: expected {needed[short]} bytes free beside what training takes at its peak, "
            f"found {found}"
        )

    def took(self, copies: Iterable[Any]) -> None:
        """Tells that copies, which come and go together, were made."""
        on_devices = [copy for copy in copies if isinstance(copy, jax.Array)]
        if not on_devices:
            return
        taken = _bytes_on_devices(on_devices)
        weakref.finalize(on_devices[0], self._gave_back, taken).atexit = False
        with self._lock:
            self._copied.update(taken)
            self._look(taken)

    def _gave_back(self, taken: Mapping[jax.Device, int]) -> None:
        """Called when copies go."""
        with self._lock:
            try:
                self._look(taken)
            finally:
                self._copied.subtract(taken)

    def failed(self) -> None:
        """Tells that memory did not suffice after all."""
        with self._lock:
            self._has_failed = True

    def _free_of_each(self, devices: Collection[jax.Device]) -> dict[jax.Device, int | None]:
        """What is left on each device; CPU devices share what the host has left."""
        host_bytes = functools.cache(host_memory.available_host_bytes)  # reads several files
        return {device: self._free(device, len(devices), host_bytes) for device in devices}

    def _free(
        self, device: jax.Device, count: int, host_bytes: Callable[[], int | None]
    ) -> int | None:
        """What is left on one of so many devices."""
        beside_peak = _free_beside_peak(self._stats(device))
        if beside_peak is None:
            free = host_bytes() if device.platform == "cpu" else None
            return None if free is None else free // count
        self._look([device])
        if self._has_failed:
            return beside_peak
        beyond = self._seen[device] - self._own[device] - self._copied[device]
        return beside_peak + beyond

    def _look(self, devices: Iterable[jax.Device]) -> None:
        """Accounts for what the devices have needed since the last look."""
        for device in devices:
            said = self._stats(device)
            if said is None or "bytes_in_use" not in said:
                continue
            in_use, copied = said["bytes_in_use"], self._copied[device]
            peak = max(said.get("peak_bytes_in_use", in_use), self._seen.get(device, 0))
            # Reached since with the copies that are there now, if not before.
            is_new = copied or peak > self._seen.get(device, -1)
            own = max(in_use, peak if is_new else 0) - copied
            self._own[device] = max(own, self._own.get(device, 0))
            self._seen[device] = peak


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
