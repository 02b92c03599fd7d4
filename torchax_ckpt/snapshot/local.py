"""The placement of a leaf: on the host, or on devices with a sharding."""

from __future__ import annotations

import enum
from typing import TypeAlias

from torchax_ckpt.runtime.lazily import jax


class Local(enum.Enum):
    """The two placements that are not shardings: the host, and JAX's default device.

    HOST means a numpy array. DEFAULT_DEVICE means a JAX array that is not committed to its device,
    such as the arrays that ``.to("jax")`` makes. If a program uses an uncommitted array together
    with committed arrays, JAX moves the uncommitted array to the devices of the committed arrays.
    If a program uses arrays that are committed to different devices, JAX raises an error.
    """

    HOST = "host"
    DEFAULT_DEVICE = "default_device"


Placement: TypeAlias = "jax.sharding.Sharding | Local"
