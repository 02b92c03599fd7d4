"""Arrays in ordinary memory of the host that still have the sharding they had on devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchax_ckpt.runtime.lazily import jax

Start = tuple[int, ...]
"""The index in an array at which a part of the array begins."""


@dataclasses.dataclass(frozen=True, eq=False)
class HostArray:
    """An array in ordinary memory of the host, with the sharding that it had on devices.

    Attributes:
      shape, dtype: of the whole array.
      sharding: how the array was sharded over devices, also over devices of other processes.
      parts: where each part begins -> the part. The parts are of one shape: either the shards of
        this process's devices, each shard once, or what this process stores.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding
    parts: Mapping[Start, np.ndarray]

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
        """Returns the whole array.

        Raises:
          ValueError: not all of its shards are among the parts.
        """
        if sum(part.size for part in self.parts.values()) < self.size:
            raise ValueError(f"an array of shape {self.shape} lacks some of its parts")
        whole = self.parts.get((0,) * self.ndim)
        if whole is None or whole.shape != self.shape:
            whole = np.empty(self.shape, self.dtype)
            for start, part in self.parts.items():
                region = tuple(slice(s, s + n) for s, n in zip(start, part.shape, strict=True))
                whole[region] = part
        elif copy:
            whole = whole.copy()
        return whole if dtype is None else whole.astype(dtype, copy=False)


def to_host_part(array: jax.Array | HostArray) -> jax.Array | HostArray:
    """Returns the part of an array that this host holds, as an array that shares the buffers.

    The part of a ``HostArray`` without parts has no parts either.

    To form the whole array again, each host calls ``sharding.shards_as`` with its part, and with
    the sharding and shape of the whole array.
    """
    from torchax_ckpt.snapshot.sharding import host_part, shards_as

    part = host_part(array.sharding, array.shape)
    if isinstance(array, jax.Array):
        return shards_as(array, part.sharding, part.shape)
    whole = array.sharding.addressable_devices_indices_map(array.shape)
    within = part.sharding.addressable_devices_indices_map(part.shape)
    starts = {start_of(within[d]): start_of(index) for d, index in whole.items()}
    parts = {to: array.parts[start] for to, start in starts.items() if start in array.parts}
    return HostArray(part.shape, array.dtype, part.sharding, parts)


def start_of(index: tuple[slice, ...] | None) -> Start:
    """Returns where a shard begins, from the index that a sharding gives for a device."""
    return tuple(dim.start or 0 for dim in index or ())
