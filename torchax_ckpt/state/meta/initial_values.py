"""Converts the values of tensors that no checkpoint supplies to arrays on their devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Sharding

from torchax_ckpt import torchax_backend
from torchax_ckpt.errors import UninitializedLeafError
from torchax_ckpt.snapshot.move_shards import put
from torchax_ckpt.snapshot.sharding import Local, Placement
from torchax_ckpt.state.leaf import Spec


class AbstractTensor(jax.ShapeDtypeStruct):
    """The abstract value of a tensor, as ``init`` gets it.

    Attributes:
      is_buffer: whether the tensor is a buffer. Zeros, for example, may be a fair start for a
        parameter, and no positions at all for a rotary embedding.
    """

    __slots__ = ("is_buffer",)

    def __init__(self, expected: Spec, sharding: Sharding | None, *, is_buffer: bool) -> None:
        super().__init__(expected.shape, np.dtype(expected.dtype), sharding=sharding)
        self.is_buffer = is_buffer


def on_placement(value: Any, expected: Spec, placement: Placement, name: str) -> jax.Array:
    """Returns a value as an array on its placement.

    Args:
      value: a torch tensor, a JAX array, or what numpy converts to an array.
      expected: the dtype and shape that the array must have.
      placement: where the array is put.
      name: the tensor's name, for messages.

    Raises:
      UninitializedLeafError: the value has another dtype or shape.
    """
    if isinstance(value, torch.Tensor):
        on_device = torchax_backend.is_device_tensor(value)
        with torchax_backend.native_torch():
            value = torchax_backend.buffer(value) if on_device else torchax_backend.to_numpy(value)
    elif not isinstance(value, jax.Array):
        value = np.asarray(value)
    if not isinstance(value, jax.Array):
        value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)
    found = Spec("jax", value.dtype.name, tuple(value.shape))
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        raise UninitializedLeafError(
            f"{name}: init returned {found.content()}, expected {expected.content()}; return an "
            "array of the expected dtype and shape",
            key_path=name,
        )
    return put({"": value}, {"": placement})[""]


def sharding_of(placement: Placement) -> Sharding | None:
    """Returns the sharding of a placement; None for the default device or the host."""
    return None if isinstance(placement, Local) else placement
