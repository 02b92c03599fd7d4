"""The settings with which TensorStore reads: what is retried, cached and done at the same time."""

from __future__ import annotations

import functools
import os

import tensorstore as ts

from torchax_ckpt.runtime import host_memory

# Retries after 1, 2, 4, ... and at most 32 seconds: two minutes in all.
_RETRIES = 8
# The most memory for unpacking one chunk of Blosc: 2 GiB for the content, and less for its blocks.
_UNPACKING_BYTES = 4 << 30


def reading_context() -> ts.Context:
    """Returns TensorStore's settings for reading: parallel file access, and a cache of the index.

    A failed request to a bucket is repeated for two minutes, by default for 15. TensorStore unpacks
    a chunk of Blosc, up to 2 GiB, before it compares the sizes. A limit on chunks that are unpacked
    at the same time keeps hostile ones from exhausting this host's memory.
    """
    most = host_memory.host_memory_bytes() // _UNPACKING_BYTES
    threads = _threads(max(1, min(most, os.cpu_count() or 1)))
    # A cache of its own for each use, because the next use may find other bytes in the same files.
    settings = {
        "cache_pool#ocdbt": {"total_bytes_limit": 100 << 20},
        "gcs_request_retries": {"max_retries": _RETRIES},
        "s3_request_retries": {"max_retries": _RETRIES},
    }
    return ts.Context(settings, threads)


@functools.cache
def _threads(num_unpacking: int) -> ts.Context:
    """Returns the settings that limit TensorStore's threads, which stay until the program ends.

    With limits of its own for each read, two of many programs crashed in a thread of TensorStore
    0.1.86; it is a guess that tasks of a failed read had outlived their limits.
    """
    return ts.Context(
        {
            "data_copy_concurrency": {"limit": num_unpacking},
            "file_io_concurrency": {"limit": 128},
        }
    )
