"""Plain CPU tensors: torch without torchax, and numpy arrays that share memory with tensors.

torch and numpy exchange bytes, because torch does not know the dtypes of ml_dtypes (bfloat16).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.utils._mode_utils


@contextlib.contextmanager
def native_torch() -> Iterator[None]:
    """Lets torch itself compute on CPU tensors in a ``with`` block, even if torchax is enabled."""
    # torchax.disable_temporarily has no effect after env.enabled was reset, as the first torch
    # operation does.
    with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        yield


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Returns the dtype of numpy or ml_dtypes that has the same name."""
    return np.dtype(str(dtype).removeprefix("torch."))


def tensor_of(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Returns a plain CPU tensor that shares the memory of a numpy array, which may be a view."""
    if array.dtype.isbuiltin != 1:  # of ml_dtypes, see array_of
        array = array.view(np.int16 if array.itemsize == 2 else np.uint8)
    with native_torch():
        return torch.from_numpy(array).view(dtype)


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """Returns a numpy array that shares the memory of a plain CPU tensor; in ``native_torch``."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    dtype = numpy_dtype(tensor.dtype)
    if dtype.isbuiltin == 1:  # numpy's own; those of ml_dtypes have 2
        return np.asarray(tensor.numpy())
    integers = torch.int16 if dtype.itemsize == 2 else torch.uint8
    return np.asarray(tensor.view(integers).numpy()).view(dtype)
