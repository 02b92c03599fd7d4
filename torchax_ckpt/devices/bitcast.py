"""Converts arrays to unsigned integers with the same bits, and back.

Programs move these integers between devices, because a sum of floats, such as an all-reduce, loses
the sign of zeros and the bits of NaNs, and XLA may convert floats of fewer than 32 bits to a wider
dtype inside a program, which changes the bits of NaNs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def to_bits(array: jax.Array) -> jax.Array:
    """Returns the bits of an array as unsigned integers of at least one byte each.

    Bools, and numbers of fewer than 8 bits, become uint8. For a complex array, the result has one
    more dim, the last, with the bits of the real part and of the imaginary part.
    """
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint8)
    num_bits = _num_bits(array.dtype)
    bits = jax.lax.bitcast_convert_type(array, f"uint{num_bits}")
    return bits.astype(jnp.uint8) if num_bits < 8 else bits


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """Converts ``bits``, as ``to_bits`` returns them, back to an array of ``dtype``."""
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
    """Returns whether the dtype is a floating-point type of fewer than 32 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and _num_bits(dtype) < 32


def _num_bits(dtype: Any) -> int:
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return int((jnp.iinfo if is_integer else jnp.finfo)(dtype).bits)
