"""Owns whether array data is compressed: as asked for, or once the medium proves slow enough.

Zstandard makes float32 weights and moments some 8 % smaller, bfloat16 weights 22 %. That shortens a
save only where the medium takes bytes more slowly than the processor compresses them, and costs
processor time that the training may want; so unless asked for it begins when the medium is several
times slower than that.
``benchmarks/compressing.py`` measures both.
"""

from __future__ import annotations

import collections
import logging
import statistics
import time

import jax

logger = logging.getLogger(__name__)

# A quarter of what two cores compress, 1.1 GB/s.
SLOW_BYTES_PER_SEC = 250e6
# Of smaller saves the time says more about round trips than about bytes.
_LEAST_BYTES = 64 << 20
# An array costs some milliseconds, whatever its size, of which the time of small ones says more.
_LEAST_MEAN_BYTES = 2 << 20
_OBSERVED = 3


class Compression:
    """Decides for each save whether it is compressed.

    Args:
      asked: what the options say; None to go by the time that saves take.
    """

    def __init__(self, asked: bool | None) -> None:
        # Processes that share an array must write it alike, and would measure differently.
        self._decides = asked is None and jax.process_count() == 1
        self.is_on = bool(asked)
        self._rates: collections.deque[float] = collections.deque(maxlen=_OBSERVED)
        self._writing: tuple[int, float] | None = None

    def begin(self, nbytes: int) -> None:
        """Tells that so many bytes are on the host: what takes time from now on is the medium."""
        self._writing = nbytes, time.perf_counter()

    def end(self, count: int) -> None:
        """Tells that they are stored, in so many arrays; how long that took counts later on.

        Unless ``begin`` was not called: where they come in batches, devices take time as well.
        """
        if self._writing is not None:
            nbytes, began = self._writing
            self._writing = None
            self.observe(nbytes, count, time.perf_counter() - began)

    def observe(self, nbytes: int, count: int, secs: float) -> None:
        """Takes how long the medium took for so many bytes, in so many arrays."""
        if not self._decides or self.is_on:
            return
        if nbytes < max(_LEAST_BYTES, count * _LEAST_MEAN_BYTES):
            return
        self._rates.append(nbytes / max(secs, 1e-9))
        median = statistics.median(self._rates)
        if len(self._rates) == _OBSERVED and median < SLOW_BYTES_PER_SEC:
            self.is_on = True
            logger.info(
                "the medium takes %.0f MB/s: array data is compressed from now on "
                "(CheckpointOptions(compression=False) never does it)",
                median / 1e6,
            )
