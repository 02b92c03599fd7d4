"""Placements of arrays, and arrays on the host that keep a sharding; imports JAX only if used."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import mmap
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from torchax_ckpt.runtime.lazily import jax

Offset = tuple[int, ...]
"""The index in an array at which a part of the array begins."""


class Local(enum.Enum):
    """The placements that are not shardings: of numpy arrays, and of uncommitted JAX arrays.

    ``.to("jax")`` makes the latter; JAX moves them to the devices of arrays used with them.
    """

    HOST = "host"
    DEFAULT_DEVICE = "default_device"


Placement: TypeAlias = "jax.sharding.Sharding | Local"


@dataclasses.dataclass(frozen=True, eq=False)
class HostArray:
    """An array in ordinary memory of the host, with the sharding that it had on devices.

    ``shape`` and ``dtype`` are of the whole array. ``parts`` maps where each part begins to the
    part, all of one shape: the shards of this process, each once, or what this process stores.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding
    parts: Mapping[Offset, np.ndarray]

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the whole array."""
        return math.prod(self.shape)

    @property
    def is_fully_addressable(self) -> bool:
        """Whether all devices of the sharding belong to this process."""
        return self.sharding.is_fully_addressable

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns the whole array; raises ValueError if some of its shards are not among parts."""
        parts = dict(self.parts)  # looks each part up once, because each look may make a stack
        if sum(part.size for part in parts.values()) < self.size:
            raise ValueError(f"an array of shape {self.shape} lacks some of its parts")
        whole = parts.get((0,) * self.ndim)
        if whole is None or whole.shape != self.shape:
            whole = np.empty(self.shape, self.dtype)
            for offset, part in parts.items():
                region = tuple(slice(s, s + n) for s, n in zip(offset, part.shape, strict=True))
                whole[region] = part
        elif copy:
            whole = whole.copy()
        return whole if dtype is None else whole.astype(dtype, copy=False)


def offset_of(index: tuple[slice, ...] | None) -> Offset:
    """Returns where a shard begins, from the index that a sharding gives for a device."""
    return tuple(dim.start or 0 for dim in index or ())


class Memory:
    """Memory of the host for arrays, mapped with the first of them.

    The system gets it back once all arrays are gone, and this object is gone or ``free`` was
    called. If the system does not give so much at once, each array has memory of its own.

    What ``malloc`` gives to one thread and another thread frees can stay with the process: with
    ``np.empty``, a process that offloaded 400 MB again and again grew from 2.9 GB to 5 GB.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._whole = self._left = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns a new array in this memory; one of its own if it does not fit."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if not len(self._whole) and self._num_bytes:
            with contextlib.suppress(OSError):  # a system that does not overcommit
                pages = mmap.mmap(-1, self._num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self._whole = self._left = np.frombuffer(pages, np.uint8)
        if aligned(num_bytes) > len(self._left):
            return np.empty(shape, dtype)
        part, self._left = np.split(self._left, [aligned(num_bytes)])
        return part[:num_bytes].view(dtype).reshape(shape)

    def reuse(self) -> None:
        """Makes the memory of all arrays so far free for others."""
        self._left = self._whole

    def free(self) -> None:
        """Lets go of the memory; the next array maps it again."""
        self._whole = self._left = np.empty(0, np.uint8)


def aligned(num_bytes: int) -> int:
    """Returns the bytes that an array takes in ``Memory``, which aligns arrays as numpy does."""
    return -(-num_bytes // 64) * 64
