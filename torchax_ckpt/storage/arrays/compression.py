"""Decides whether and how saves compress array data: by the user's option, or by storage speed.

The high bits of floating-point numbers, which hold the sign and the exponent, differ little from
number to number; the low bits are nearly random. Blosc therefore rearranges the bits or the bytes
of the numbers before it compresses them, so that equal bits of many numbers lie together. A step
with Blosc is standard Zarr version 2: Orbax and TensorStore read it without this package.

Compression shortens a save only if storage takes bytes more slowly than the processor compresses
them. Compression also costs processor time that the training may need. If the user did not set
``CheckpointOptions.compression``, saves do not compress at first. In a run of one process, they
compress from the time when the last three measured saves have a median speed below
``SLOW_BYTES_PER_SEC``. In a run of several processes, they do not compress.
``benchmarks/compressing.py`` measures sizes and speeds of all codecs.
"""

from __future__ import annotations

import collections
import logging
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

from torchax_ckpt.options import Codec

logger = logging.getLogger(__name__)

# The codec of ``compression=True``: smaller and faster than Zstandard alone, for weights and for
# moments.
_DEFAULT: Codec = "blosc-lz4"
# The metadata of Zarr version 2 that makes TensorStore compress so.
_METADATA: dict[Codec, dict[str, Any]] = {
    "zstd": {"id": "zstd", "level": 1},
    # Shuffles bits. LZ4 replaces repetitions, but does not encode frequent bytes in fewer bits, so
    # it gains little from shuffled bytes.
    "blosc-lz4": {"id": "blosc", "cname": "lz4", "clevel": 1, "shuffle": 2, "blocksize": 0},
    # Shuffles bytes. Zstandard chooses a code for each 128 KiB. In a block of 1 MiB, the bytes of
    # one significance fill at least 128 KiB, and share no code with others. Blosc itself would
    # choose smaller blocks, and lose the benefit.
    "blosc-zstd": {
        "id": "blosc",
        "cname": "zstd",
        "clevel": 1,
        "shuffle": 1,
        "blocksize": 1 << 20,
    },
}
# Blosc compresses chunks of less than 2 GiB.
_MAX_BLOSC_BYTES = (1 << 31) - 17
_MAX_ITEM_BYTES = 16

# Two idle cores compress weights and moments at 4 GB/s, by a tenth or more. So even if storage
# waited for the compression, it would shorten saves to a medium slower than 400 MB/s. The limit is
# lower, because training needs the cores too.
SLOW_BYTES_PER_SEC = 250e6
# Small saves measure latency, not bandwidth.
_MIN_BYTES = 64 << 20
# Each array costs some milliseconds, whatever its size. Small arrays measure that cost.
_MIN_MEAN_BYTES = 2 << 20
_NUM_OBSERVED = 3


def codec_of(option: bool | Codec | None) -> Codec | None:
    """Returns the codec for which ``CheckpointOptions.compression`` asks; None for none."""
    return _DEFAULT if option is True else option or None


def zarr_compressor(codec: Codec, chunk: Sequence[int]) -> dict[str, Any]:
    """Returns Zarr's metadata of a compressor for an array with chunks of shape ``chunk``.

    The compressor is Zstandard if a chunk might be too large for Blosc. Such a chunk is one that
    ``chunking`` cannot cut, because the dims of its array have no small divisors.
    """
    is_too_large = math.prod(chunk) * _MAX_ITEM_BYTES > _MAX_BLOSC_BYTES
    return dict(_METADATA["zstd" if is_too_large else codec])


class Compression:
    """Decides for each save how the array data of the save is compressed.

    Attributes:
      codec: the codec of the next save; None for no compression.

    Args:
      asked: the user's option; None to decide by the time that saves take.
    """

    def __init__(self, asked: bool | Codec | None) -> None:
        # Processes that share an array must write it in the same form, but would measure different
        # times.
        self._decides = asked is None and jax.process_count() == 1
        self.codec = codec_of(asked)
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
        if not self._decides or self.codec is not None:
            return
        if nbytes < max(_MIN_BYTES, count * _MIN_MEAN_BYTES):
            return
        self._rates.append(nbytes / max(secs, 1e-9))
        median = statistics.median(self._rates)
        if len(self._rates) == _NUM_OBSERVED and median < SLOW_BYTES_PER_SEC:
            self.codec = _DEFAULT
            logger.info(
                "storage takes %.0f MB/s: array data is compressed from now on "
                "(CheckpointOptions(compression=False) prevents this)",
                median / 1e6,
            )
