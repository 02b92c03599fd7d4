"""Decides whether devices can hold copies of a state while the next training step runs."""

from __future__ import annotations

import collections
import functools
import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax

from torchax_ckpt.devices.device_sizes import Needed, bytes_on_devices
from torchax_ckpt.runtime import host_memory

# Free memory must be at least this factor times the size of the copies, because a training step
# runs while the copies exist.
HEADROOM = 1.25


def free_device_bytes(device: jax.Device) -> int | None:
    """Returns the free bytes of a device, for a CPU the host's; None if they are unknown."""
    beyond_peak = _free_beyond_peak(device.memory_stats())
    if beyond_peak is None and device.platform == "cpu":
        return host_memory.available_host_bytes()
    return beyond_peak


def _free_beyond_peak(stats: Mapping[str, int] | None) -> int | None:
    """Returns the bytes that were never used: the next training step needs the peak again."""
    if not stats or "bytes_limit" not in stats or "bytes_in_use" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("peak_bytes_in_use", stats["bytes_in_use"])


def is_exhausted(error: BaseException) -> bool:
    """Returns whether an error is the one that JAX raises when a device is out of memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


class DeviceMemory:
    """Decides from memory statistics and a record of earlier copies whether new copies fit.

    The peak memory use that a device reports never falls, and includes the copies of earlier saves.
    This class therefore keeps, for each device, an upper bound of what the program needs without
    copies: the peak, less the copies that existed when it was reached. To know these, it reads the
    statistics when copies are made and when they are freed. Once any device has run out of memory,
    it assumes that the program needs the whole peak on every device.

    The bound can be too low: if the program begins to need more memory, but not more than program
    and copies together needed before, no statistic shows the growth.

    The memory of the host that an offload needs counts as used from its beginning. No other process
    of the run is assumed to share the host. Several threads may use one object at the same time.

    ``stats`` and ``host_bytes`` return what JAX reports of a device, and the available bytes of the
    host, or None if that is unknown. ``may_offload`` is False once an offload has run out of memory
    although ``host_holds`` was True.
    """

    def __init__(
        self,
        stats: Callable[[jax.Device], Mapping[str, int] | None] | None = None,
        host_bytes: Callable[[], int | None] | None = None,
    ) -> None:
        self._stats = stats or (lambda device: device.memory_stats())
        self._host_bytes = host_bytes or host_memory.available_host_bytes
        # Reentrant, because Python may collect copies, and call _forget_copies, inside these
        # methods too.
        self._lock = threading.RLock()
        # In bytes by device: the upper bound of the program's own peak, the whole peak at the last
        # update, and the copies that exist.
        self._program_peak: dict[jax.Device, int] = {}
        self._last_peak: dict[jax.Device, int] = {}
        self._copy_bytes: collections.Counter[jax.Device] = collections.Counter()
        self._has_failed = False
        # Bytes of the host: those that offloads have yet to allocate, and the most that one offload
        # took of pinned memory.
        self._promised_bytes, self._pinned_bytes = 0, 0
        self.may_offload = True

    def holds(self, needed: Mapping[jax.Device, int]) -> bool:
        """Returns whether each device has memory for the bytes that copies need there."""
        with self._lock:
            free = self._free_of_each(needed)
            return all(
                (left := free[device]) is None or num_bytes * HEADROOM <= left
                for device, num_bytes in needed.items()
            )

    def host_holds(self, needed: Needed) -> bool:
        """Returns whether the host has memory for an offload."""
        available = self.available_on_host()
        # The runtime may have kept pinned memory that an earlier offload took.
        pinned_bytes = max(0, needed.pinned_bytes - self._pinned_bytes)
        return available is None or (pinned_bytes + needed.ordinary_bytes) * HEADROOM <= available

    def begin_offload(self, needed: Needed) -> None:
        """Records that an offload begins: the host memory that it needs counts as used."""
        with self._lock:
            self._promised_bytes += needed.host_bytes

    def end_offload(self, needed: Needed) -> None:
        """Records that an offload has allocated its memory, or needs none any more."""
        with self._lock:
            self._promised_bytes -= needed.host_bytes
            self._pinned_bytes = max(self._pinned_bytes, needed.pinned_bytes)

    def available_on_host(self) -> int | None:
        """Returns the bytes of the host that offloads may take; None if they are unknown."""
        available = self._host_bytes()
        return None if available is None else available - self._promised_bytes

    def shortage(self, needed: Mapping[jax.Device, int]) -> str:
        """Returns as text the bytes that are needed and free on the device that lacks most."""
        if not needed:
            return "the copies take no memory of devices"
        with self._lock:
            free = self._free_of_each(needed)
        short = min(needed, key=lambda d: math.inf if (f := free[d]) is None else f - needed[d])
        found = "unknown" if free[short] is None else f"{free[short]} bytes"
        return (
            f"{short}: expected {needed[short]} bytes free beyond the peak of training, found "
            f"{found}"
        )

    def record_copies(self, copies: Iterable[Any]) -> None:
        """Records copies that were just made, and that the caller frees all at the same time."""
        on_devices = [copy for copy in copies if isinstance(copy, jax.Array)]
        if not on_devices:
            return
        num_bytes = bytes_on_devices(on_devices)
        weakref.finalize(on_devices[0], self._forget_copies, num_bytes).atexit = False
        with self._lock:
            self._copy_bytes.update(num_bytes)
            self._update(num_bytes)

    def _forget_copies(self, num_bytes: Mapping[jax.Device, int]) -> None:
        with self._lock:
            try:
                self._update(num_bytes)
            finally:
                self._copy_bytes.subtract(num_bytes)

    def record_failure(self) -> None:
        """Records that a device ran out of memory although ``holds`` returned True."""
        with self._lock:
            self._has_failed = True

    def _free_of_each(self, devices: Collection[jax.Device]) -> dict[jax.Device, int | None]:
        """Returns the free bytes of each device; CPU devices share the host's memory equally."""
        # Cached, because each call reads several files.
        host_bytes = functools.cache(self._host_bytes)
        return {device: self._free(device, len(devices), host_bytes) for device in devices}

    def _free(
        self, device: jax.Device, count: int, host_bytes: Callable[[], int | None]
    ) -> int | None:
        beyond_peak = _free_beyond_peak(self._stats(device))
        if beyond_peak is None:
            free = host_bytes() if device.platform == "cpu" else None
            return None if free is None else free // count
        self._update([device])
        if self._has_failed:
            return beyond_peak
        spare = self._last_peak[device] - self._program_peak[device] - self._copy_bytes[device]
        return beyond_peak + spare

    def _update(self, devices: Iterable[jax.Device]) -> None:
        """Updates each device's bound of the program's memory from the present statistics."""
        for device in devices:
            stats = self._stats(device)
            if stats is None or "bytes_in_use" not in stats:
                continue
            in_use, copied = stats["bytes_in_use"], self._copy_bytes[device]
            peak = max(stats.get("peak_bytes_in_use", in_use), self._last_peak.get(device, 0))
            # A new peak that was reached while copies existed includes them, so they are taken off.
            # The bound already counts an earlier peak, and max preserves that.
            is_new = copied or peak > self._last_peak.get(device, -1)
            program = max(in_use, peak if is_new else 0) - copied
            self._program_peak[device] = max(program, self._program_peak.get(device, 0))
            self._last_peak[device] = peak
