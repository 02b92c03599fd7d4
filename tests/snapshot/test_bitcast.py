"""Arrays as the integers of their bits come back as they were, whatever they hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.strategies import random_bits

from torchax_ckpt.snapshot.bitcast import from_bits, to_bits

DTYPES = [
    *("bool", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("float8_e8m0fnu", "float4_e2m1fn", "int4", "uint4"),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_come_back(dtype: str) -> None:
    array = jnp.asarray(random_bits(dtype, (64, 8), seed=1))
    back = jax.jit(lambda x: from_bits(to_bits(x), dtype))(array)
    assert back.dtype == array.dtype
    assert np.asarray(back).tobytes() == np.asarray(array).tobytes()
