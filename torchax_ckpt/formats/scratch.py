"""Owns memory that lies in a file: for what is written as a whole, and larger than may be held."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.storage.arrays.read_arrays import STREAMED_BYTES
from torchax_ckpt.stored.stored_step import StoredLeaf

_ALIGNMENT = 64

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], np.ndarray]


@contextlib.contextmanager
def room_for(
    leaves: Sequence[StoredLeaf], folder: Path, options: CheckpointOptions
) -> Iterator[Allocate | None]:
    """Where to read leaves to, all at once: memory if they may be held, a file if they may not.

    Yields:
      What makes arrays in a file without a name, which the system keeps in memory as it sees fit;
      None for this host's memory.

    Raises:
      DirectoryError: there is no room for them.
    """
    nbytes = sum(leaf.nbytes for leaf in leaves)
    if nbytes <= (options.max_host_bytes or STREAMED_BYTES):
        yield None
        return
    total = nbytes + _ALIGNMENT * len(leaves)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            # Writing to a mapped file that lacks the room kills a program.
            os.posix_fallocate(file.fileno(), 0, total)
            memory = np.memmap(file, np.uint8, "r+", shape=(total,)).view(np.ndarray)
    except OSError as error:
        raise DirectoryError(
            f"{folder}: has no room for {total} bytes meanwhile: {error}", path=folder
        ) from error
    end = 0

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        nonlocal end
        begin = end
        size = math.prod(shape) * dtype.itemsize
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return memory[begin : begin + size].view(dtype).reshape(shape)

    yield allocate
