"""The codecs of array data, as metadata of Zarr.

The high bits of floating-point numbers differ little from number to number; Blosc puts these
together before it compresses. A step with Blosc is standard Zarr version 2, readable without this
package. ``benchmarks/compressing.py`` measures sizes and speeds of all codecs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torchax_ckpt.options import Codec

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


def codec_of(option: bool | Codec) -> Codec | None:
    """Returns the codec for which ``CheckpointOptions.compression`` asks; None for none."""
    return _DEFAULT if option is True else option or None


def zarr_compressor(codec: Codec, chunk: Sequence[int]) -> dict[str, Any]:
    """Returns Zarr's metadata of a compressor for chunks of this shape.

    Zstandard if a chunk might be too large for Blosc: ``chunking`` cannot cut dims without small
    divisors.
    """
    is_too_large = math.prod(chunk) * _MAX_ITEM_BYTES > _MAX_BLOSC_BYTES
    return dict(_METADATA["zstd" if is_too_large else codec])
