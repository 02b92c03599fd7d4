"""Determines the spec of a tensor or array, whether it can be stored, and the array to store.

The kind of a leaf is a ``torchax`` or ``torch`` tensor, a ``jax`` or ``numpy`` array, a
``numpy_scalar``, or a ``key``: a typed JAX random key, stored as its key data.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax_ckpt import torchax_backend
from torchax_ckpt.errors import UnsupportedLeafError
from torchax_ckpt.layout.manifest import STORABLE_DTYPES

Array = jax.Array | np.ndarray
DEVICE_KINDS = frozenset({"torchax", "jax", "key"})


def array_of(value: Any, name: str) -> Array:
    """Returns a leaf's device array, or a copy of its host array; call it in ``native_torch``."""
    if isinstance(value, jax.Array):
        if isinstance(value.dtype, np.dtype):  # quicker than the question below
            return value
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(value) if is_key else value
    if isinstance(value, torch.Tensor):
        if torchax_backend.is_device_tensor(value):
            return torchax_backend.buffer(value)
        if value.is_meta:
            raise UnsupportedLeafError(
                f"{name}: is on the meta device and holds no data. Attach the module of this "
                "tensor, so that a checkpoint or init= fills the tensor",
                key_path=name,
            )
        return torchax_backend.to_numpy(value)
    return np.array(value)


def arrays_of(tensors: Sequence[torch.Tensor], name: str) -> list[Array]:
    """Returns the arrays to store for tensors; copies 0-d CPU tensors of one dtype at once."""
    with torchax_backend.native_torch():
        arrays: list[Any] = torchax_backend.buffers(tensors)
        on_host = [i for i, array in enumerate(arrays) if array is None]
        scalars = [i for i in on_host if tensors[i].ndim == 0 and not tensors[i].is_meta]
        copies = torchax_backend.scalars_to_numpy([tensors[i] for i in scalars])
        for i, copy in zip(scalars, copies, strict=True):
            arrays[i] = copy
        for i in on_host:
            if arrays[i] is None:
                arrays[i] = array_of(tensors[i], name)
    return arrays


class Specs:
    """The types, dtypes and shapes of tensors: all that their nodes depend on but the names."""

    def __init__(self, tensors: Sequence[torch.Tensor], arrays: Sequence[Any]) -> None:
        self._types = list(map(type, tensors))
        # The arrays that one compiled function returns share these objects, so most comparisons are
        # of identities.
        self._described: list[Any] = [
            # The shape of scalars is left out, because tuples cost the garbage collector time.
            array.aval if type(array) is not np.ndarray
            else array.dtype if array.ndim == 0
            else (array.dtype, array.shape)
            for array in arrays
        ]  # fmt: skip

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Specs):
            return NotImplemented
        # Descriptions also differ by weak types and meshes, on which no node depends.
        return self._types == other._types and (
            self._described == other._described or self._contents() == other._contents()
        )

    __hash__ = None  # type: ignore[assignment]

    def _contents(self) -> list[Any]:
        return [
            (d.dtype, d.shape) if isinstance(d, jax.core.ShapedArray) else d
            for d in self._described
        ]


@dataclasses.dataclass(frozen=True)
class Spec:
    """The kind, dtype and shape of a leaf, without the leaf's values."""

    kind: str  # see the module's docstring
    dtype: str  # numpy's or ml_dtypes' name
    shape: tuple[int, ...]  # of a random key: of its key data
    impl: str | None = None  # of a random key
    is_weak: bool = False  # a weakly typed JAX array

    def node(self, name: str) -> dict[str, Any]:
        """Returns the array node of a leaf with this spec."""
        return {
            "array": name,
            "kind": self.kind,
            "dtype": self.dtype,
            "shape": list(self.shape),
            **({} if self.impl is None else {"impl": self.impl}),
            **({"weak": True} if self.is_weak else {}),
        }

    @classmethod
    def of_node(cls, node: Mapping[str, Any]) -> Spec:
        """Returns the spec that an array node describes."""
        return cls(
            node["kind"],
            node["dtype"],
            tuple(node["shape"]),
            node.get("impl"),
            bool(node.get("weak")),
        )

    @property
    def on_device(self) -> bool:
        """True if leaves of this kind lie on devices, False if they lie on the host."""
        return self.kind in DEVICE_KINDS

    @property
    def nbytes(self) -> int:
        """The size in bytes of the whole array, over all devices and hosts."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def content(self) -> str:
        """Returns dtype and shape (and a key's implementation) as text for messages."""
        impl = f" ({self.impl})" if self.impl else ""
        return f"{self.dtype}{list(self.shape)}{impl}"


@functools.cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Returns the name of a dtype. Cached, because numpy builds the name again at each access."""
    return dtype.name


def describe(value: Any, name: str) -> Spec:
    """Returns the spec of a tensor, array or ShapeDtypeStruct; else raises UnsupportedLeafError."""

    def refuse(why: str) -> UnsupportedLeafError:
        return UnsupportedLeafError(f"{name}: {why}", key_path=name)

    def require_storable(dtype: np.dtype[Any]) -> None:
        if dtype_name(dtype) not in STORABLE_DTYPES:
            raise refuse(f"has dtype {dtype}, which storage cannot hold")

    if isinstance(value, torch.Tensor):
        if torchax_backend.is_device_tensor(value):
            try:
                array = torchax_backend.buffer(value)
            except RuntimeError as error:  # the value is a view of a deleted tensor
                raise refuse(
                    f"the buffer of this tensor was donated to a jitted step and is gone: {error}. "
                    "Save the tensors that the step returned"
                ) from error
            if isinstance(array, jax.core.Tracer):
                raise refuse(_TRACER)
            require_storable(array.dtype)
            return Spec("torchax", dtype_name(array.dtype), tuple(array.shape))
        if why := torchax_backend.why_unsupported(value):  # also if it has no storable dtype
            raise refuse(why)
        return Spec(
            "torch", dtype_name(torchax_backend.numpy_dtype(value.dtype)), tuple(value.shape)
        )
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        if isinstance(value, jax.core.Tracer):
            raise refuse(_TRACER)
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            dtype, more_dims = _key_data(value.dtype)
            keys = value if isinstance(value, jax.Array) else _no_keys(value.dtype)
            impl = str(jax.random.key_impl(keys))
            return Spec("key", dtype, (*value.shape, *more_dims), impl)
        require_storable(value.dtype)
        weak = bool(value.weak_type)
        return Spec("jax", dtype_name(value.dtype), tuple(value.shape), is_weak=weak)
    require_storable(value.dtype)
    if not value.dtype.isnative:
        raise refuse(
            f"an array of dtype {value.dtype}, which is not in native byte order, cannot be "
            "stored; convert the array with astype"
        )
    if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
        raise refuse(f"is a {type(value).__name__}, a subclass of numpy.ndarray")
    kind = "numpy_scalar" if isinstance(value, np.generic) else "numpy"
    return Spec(kind, dtype_name(value.dtype), tuple(value.shape))


@functools.cache  # asks JAX once for each dtype, because JAX caches an entry for each shape
def _key_data(dtype: Any) -> tuple[str, tuple[int, ...]]:
    """Returns the dtype of the key data of random keys, and the dims of one key's data."""
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
    return dtype_name(data.dtype), tuple(data.shape)


@functools.cache
def _no_keys(dtype: Any) -> jax.Array:
    """Returns an empty array of keys: JAX tells the implementation of keys only for an array."""
    return jnp.empty((0,), dtype)


def require_jax_dtype(dtype: str, name: str) -> None:
    """Raises UnsupportedLeafError if JAX would narrow the dtype: int64 2**40 to int32 0, say."""
    if jax.dtypes.canonicalize_dtype(np.dtype(dtype)) != np.dtype(dtype):
        raise UnsupportedLeafError(
            f"{name}: is {dtype}, which JAX would convert to a narrower dtype. Set "
            "jax_enable_x64, or, for load, ask for a numpy array or a CPU tensor in the "
            "abstract state.",
            key_path=name,
        )


_TRACER = "is a JAX tracer; save outside of jit, grad and other transformations"
