"""Decides whether saves compress array data: by the user's option, or else by storage speed.

Compression by Zstandard makes float32 weights and optimizer moments about 8 % smaller, and bfloat16
weights 22 % smaller. Compression shortens a save only if storage takes bytes more slowly than the
processor compresses them. Compression also costs processor time that the training may need. If the
user did not set ``CheckpointOptions.compression``, saves do not compress at first. In a run of one
process, they compress from the time when the last three measured saves have a median speed below a
quarter of the speed of compression (``SLOW_BYTES_PER_SEC``). In a run of several processes, they do
not compress. ``benchmarks/compressing.py`` measures the speed of saves with and without
compression.
"""

from __future__ import annotations

import collections
import logging
import statistics
import time

import jax

logger = logging.getLogger(__name__)

# A quarter of the 1.1 GB/s that two cores compress.
SLOW_BYTES_PER_SEC = 250e6
# Small saves measure latency, not bandwidth.
_MIN_BYTES = 64 << 20
# Each array costs some milliseconds, whatever its size. Small arrays measure that cost.
_MIN_MEAN_BYTES = 2 << 20
_NUM_OBSERVED = 3


class Compression:
    """Decides for each save whether the array data of the save is compressed.

    Args:
      asked: the user's option; None to decide by the time that saves take.
    """

    def __init__(self, asked: bool | None) -> None:
        # Processes that share an array must write it in the same form, but would measure different
        # times.
        self._decides = asked is None and jax.process_count() == 1
        self.is_on = bool(asked)
        self._rates: collections.deque[float] = collections.deque(maxlen=_NUM_OBSERVED)
        self._writing: tuple[int, float] | None = None

    def begin(self, nbytes: int) -> None:
        """Starts the clock of a save, whose ``nbytes`` bytes are now on the host."""
        self._writing = nbytes, time.perf_counter()

    def end(self, count: int) -> None:
        """Records how long storage took, since ``begin``, to write the ``count`` arrays of a save.

        Does nothing if ``begin`` was not called. ``begin`` is not called for a save in several
        batches, because the time of such a save includes transfers from devices.
        """
        if self._writing is not None:
            nbytes, began = self._writing
            self._writing = None
            self.observe(nbytes, count, time.perf_counter() - began)

    def observe(self, nbytes: int, count: int, secs: float) -> None:
        """Records the time ``secs`` of writing ``count`` arrays with ``nbytes`` bytes in all.

        Turns compression on if the median speed of the last three recorded saves is low.
        Does not record small saves or saves of small arrays, because they measure latency.
        """
        if not self._decides or self.is_on:
            return
        if nbytes < max(_MIN_BYTES, count * _MIN_MEAN_BYTES):
            return
        self._rates.append(nbytes / max(secs, 1e-9))
        median = statistics.median(self._rates)
        if len(self._rates) == _NUM_OBSERVED and median < SLOW_BYTES_PER_SEC:
            self.is_on = True
            logger.info(
                "storage takes %.0f MB/s: array data is compressed from now on "
                "(CheckpointOptions(compression=False) prevents this)",
                median / 1e6,
            )
