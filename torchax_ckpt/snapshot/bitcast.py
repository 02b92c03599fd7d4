"""Arrays as the integers of their bits: what arithmetic and conversions would change is kept.

Sums of floats lose the sign of zeros and the bits of NaNs, XLA converts small floats on the way,
and sums of narrow integers come out wide.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def to_bits(array: jax.Array) -> jax.Array:
    """Unsigned integers of at least a byte; of complex numbers two, in a last dim."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint8)
    num_bits = _num_bits(array.dtype)
    bits = jax.lax.bitcast_convert_type(array, f"uint{num_bits}")
    return bits.astype(jnp.uint8) if num_bits < 8 else bits


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """What ``to_bits`` was given."""
    target = jnp.dtype(dtype)
    if target == jnp.bool_:
        return bits != 0
    if jnp.issubdtype(target, jnp.complexfloating):
        real, imag = jnp.moveaxis(from_bits(bits, f"float{target.itemsize * 4}"), -1, 0)
        return jax.lax.complex(real, imag)
    num_bits = _num_bits(target)
    narrow = bits.astype(f"uint{num_bits}") if num_bits < 8 else bits
    return jax.lax.bitcast_convert_type(narrow, target)


def is_small_float(dtype: Any) -> bool:
    """Whether it is a float that XLA may convert to a wider one on the way, which changes NaNs."""
    return jnp.issubdtype(dtype, jnp.floating) and _num_bits(dtype) < 32


def _num_bits(dtype: Any) -> int:
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return int((jnp.iinfo if is_integer else jnp.finfo)(dtype).bits)
