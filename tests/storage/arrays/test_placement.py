"""Host memory that is read into, and which devices of the CPU take over."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from torchax_ckpt.storage.arrays.assembly import empty


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float8_e5m2", "float32", "complex128"])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 1 << 20), ((16 << 20) + 1,)], ids=str)
def test_a_cpu_device_takes_it_over(shape: tuple[int, ...], dtype: str) -> None:
    array = empty(shape, np.dtype(dtype))
    assert (array.shape, array.dtype.name) == (shape, dtype)
    array[...] = 1
    if array.size > 1:
        with jax.enable_x64(True):
            moved = jax.device_put(array, jax.devices()[3])
        assert moved.dtype == array.dtype
        assert moved.unsafe_buffer_pointer() == array.ctypes.data


def test_what_no_memory_can_hold_is_said_as_numpy_says_it() -> None:
    with pytest.raises(MemoryError, match=r"float64\[17592186044416\]"):
        empty((1 << 44,), np.dtype("float64"))
