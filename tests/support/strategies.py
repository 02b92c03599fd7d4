"""Arrays with arbitrary bits, trees of every supported value, and fingerprints of trees."""

from __future__ import annotations

import collections
import struct
from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch
from hypothesis import strategies as st

from support.compare import bits
from torchax_ckpt import torchax_backend

FP8 = ("float8_e4m3fn", "float8_e5m2")
JAX_DTYPES = (
    "bool", "int4", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16",
    "float32", *FP8, "complex64",
)  # fmt: skip
# A torchax tensor around an int4 array has dtype torch.int8, but the array stays int4.
TORCHAX_DTYPES = JAX_DTYPES
NUMPY_DTYPES = (*JAX_DTYPES, "int64", "uint64", "float64", "complex128")
TORCH_DTYPES = tuple(name for name in NUMPY_DTYPES if name != "int4")
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (3,), (2, 0, 3), (2, 3))
KEY_IMPLS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}


def random_bits(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Returns an array with arbitrary bits, including NaN payloads, infinities and subnormals."""
    generator = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return np.asarray(generator.integers(0, 2, shape).astype(bool))
    if kind == ml_dtypes.int4:
        return np.asarray(generator.integers(-8, 8, shape)).astype(kind)
    if kind in (ml_dtypes.uint4, ml_dtypes.float4_e2m1fn):  # Stored in the low half of a byte.
        return np.asarray(generator.integers(0, 16, shape).astype(np.uint8)).view(kind)
    size = int(np.prod(shape)) * kind.itemsize
    return np.frombuffer(generator.bytes(size), kind).reshape(shape).copy()


def make_leaf(kind: str, dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    """Returns a leaf of a kind that a manifest names; device leaves are uncommitted."""
    if kind == "key":
        width = KEY_IMPLS[dtype]
        words = jax.device_put(random_bits("uint32", (*shape, width), seed))
        return jax.random.wrap_key_data(words, impl=dtype)
    array = random_bits(dtype, shape, seed)
    match kind:
        case "torch":
            return torchax_backend.from_numpy(array)
        case "torchax":
            return torchax_backend.wrap(jax.device_put(array))
        case "jax":
            return jax.device_put(array)
        case "numpy_scalar":
            return array.reshape(-1)[0]
        case _:
            return array


DTYPES_BY_KIND = {
    "torch": TORCH_DTYPES,
    "torchax": TORCHAX_DTYPES,
    "jax": JAX_DTYPES,
    "numpy": NUMPY_DTYPES,
    "numpy_scalar": NUMPY_DTYPES,
    "key": tuple(KEY_IMPLS),
}


@st.composite
def array_leaves(draw: st.DrawFn) -> Any:
    """Generates tensors, arrays, numpy scalars and random keys of every dtype and some shapes."""
    kind = draw(st.sampled_from(sorted(DTYPES_BY_KIND)))
    dtype = draw(st.sampled_from(DTYPES_BY_KIND[kind]))
    shape = () if kind == "numpy_scalar" else draw(st.sampled_from(SHAPES))
    return make_leaf(kind, dtype, shape, draw(st.integers(0, 2**32 - 1)))


def any_floats() -> st.SearchStrategy[float]:
    """Generates any of the 2**64 floats: NaN payloads, infinities, -0.0."""
    words = st.integers(0, 2**64 - 1).map(lambda n: struct.unpack("<d", struct.pack("<Q", n))[0])
    return st.floats() | words


def any_text() -> st.SearchStrategy[str]:
    """Generates text with lone surrogates and with characters that names escape."""
    return st.text(st.characters() | st.sampled_from("%/*\ud800\udc00\x00"), max_size=6)


def plain_leaves() -> st.SearchStrategy[Any]:
    """Generates Python values that are stored without an array."""
    huge = st.integers(-(2**200), 2**200)
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        huge,
        any_floats(),
        st.builds(complex, any_floats(), any_floats()),
        any_text(),
        st.binary(max_size=6),
    )


def dict_keys() -> st.SearchStrategy[Any]:
    """Generates dict keys: ints, also huge ones, text and tuples; 1 and "1" among them."""
    simple = st.sampled_from([1, "1", 0, "0", ""]) | st.integers() | any_text()
    return simple | st.tuples(simple, simple) | st.integers(2**60, 2**61)


def hashables() -> st.SearchStrategy[Any]:
    """Generates members of sets."""
    simple = st.integers() | any_text() | st.none() | st.binary(max_size=3)
    return st.recursive(
        simple, lambda c: st.tuples(c, c) | st.frozensets(c, max_size=2), max_leaves=4
    )


def trees(max_leaves: int = 12) -> st.SearchStrategy[Any]:
    """Generates nested state of all value types that a restore returns with the same type."""

    def nested(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        dicts = st.dictionaries(dict_keys(), children, max_size=4)
        return st.one_of(
            st.lists(children, max_size=4),
            st.lists(children, max_size=3).map(tuple),
            dicts,
            dicts.map(collections.OrderedDict),
        )

    leaves = st.one_of(
        plain_leaves(),
        array_leaves(),
        st.sets(hashables(), max_size=3),
        st.frozensets(hashables(), max_size=3),
        st.dictionaries(dict_keys(), st.integers(), max_size=3).map(collections.Counter),
    )
    return st.recursive(leaves, nested, max_leaves=max_leaves)


def fingerprint(value: Any) -> Any:
    """Returns a hashable that identifies a value with the types of its keys and all its bits."""
    if isinstance(value, (torch.Tensor, jax.Array, np.ndarray, np.generic)):
        return bits(value)
    name = type(value).__name__
    if isinstance(value, dict):
        return name, tuple((fingerprint(k), fingerprint(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return name, tuple(fingerprint(v) for v in value)
    if isinstance(value, (set, frozenset)):
        return name, frozenset(fingerprint(v) for v in value)
    if isinstance(value, float):
        return name, struct.pack("<d", value)
    if isinstance(value, complex):
        return name, struct.pack("<dd", value.real, value.imag)
    return name, value
