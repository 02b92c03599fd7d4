"""Owns whether array data is compressed: as asked for, or once the medium proves slow enough.

Zstandard makes float32 weights and moments some 8 % smaller, bfloat16 weights 22 %. That shortens a
save only where the medium takes bytes more slowly than the processor compresses them, and costs
processor time that the training may want; so unless asked for it begins when the medium is several
times slower than that.
``benchmarks/compressing.py`` measures both.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import statistics
import time
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from torchax_ckpt.sharding import shards_of

logger = logging.getLogger(__name__)

# A quarter of what two cores compress, 1.1 GB/s.
SLOW_BYTES_PER_SEC = 250e6
# Of smaller saves the time says more about round trips than about bytes.
_LEAST_BYTES = 64 << 20
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

    @contextlib.contextmanager
    def observed(self, arrays: Iterable[jax.Array | np.ndarray]) -> Iterator[None]:
        """Within it the arrays are written; how long that took counts for later saves."""
        nbytes = stored_bytes(arrays)  # at the end they may have been donated
        began = time.perf_counter()
        yield
        if not self.is_on:
            self.observe(nbytes, time.perf_counter() - began)

    def observe(self, nbytes: int, secs: float) -> None:
        """Takes how long the medium took for so many bytes."""
        if not self._decides or nbytes < _LEAST_BYTES:
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


def stored_bytes(arrays: Iterable[jax.Array | np.ndarray]) -> int:
    """How many bytes of the arrays this process stores: of each part one replica."""
    return sum(
        sum(shard.data.nbytes for shard in shards_of(array) if shard.replica_id == 0)
        if isinstance(array, jax.Array)
        else array.nbytes
        for array in arrays
    )
