"""Allocates arrays in a temporary file, for exports that are larger than ``max_host_bytes``."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.storage.arrays.read_arrays import STREAMED_BYTES
from torchax_ckpt.storage.medium import permissions
from torchax_ckpt.stored.stored_step import StoredLeaf

_ALIGNMENT = 64

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], np.ndarray]


@contextlib.contextmanager
def room_for(
    leaves: Sequence[StoredLeaf], folder: Path, options: CheckpointOptions
) -> Iterator[Allocate | None]:
    """Provides room for all leaves: a temporary file if they exceed the bound, else memory.

    Args:
      leaves: the leaves that will be read.
      folder: directory for the file, which is temporary and nameless; created if necessary.
      options: ``max_host_bytes`` is the bound.

    Yields:
      A function that allocates an array in the file, whose pages the operating system keeps in
      memory or evicts; None if the leaves do not exceed the bound, so that they are read into
      ordinary memory.

    Raises:
      DirectoryError: the disk has no room for the leaves.
    """
    nbytes = sum(leaf.nbytes for leaf in leaves)
    if nbytes <= (options.max_host_bytes or STREAMED_BYTES):
        yield None
        return
    total = nbytes + _ALIGNMENT * len(leaves)
    try:
        permissions.make_folder(epath.Path(folder))
        with tempfile.TemporaryFile(dir=folder) as file:
            # Reserves the space, because a write to a mapped file on a full disk would kill the
            # process.
            os.posix_fallocate(file.fileno(), 0, total)
            memory = np.memmap(file, np.uint8, "r+", shape=(total,)).view(np.ndarray)
    except OSError as error:
        raise DirectoryError(
            f"{folder}: has no room for a temporary file of {total} bytes: {error}. Free disk "
            "space, or raise max_host_bytes to the size of all leaves: then no such file is made",
            path=folder,
        ) from error
    end = 0

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        nonlocal end
        begin = end
        size = math.prod(shape) * dtype.itemsize
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return memory[begin : begin + size].view(dtype).reshape(shape)

    yield allocate
