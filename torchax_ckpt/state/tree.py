"""Owns the form of a state tree: any Python state as JSON nodes plus named leaves, and back.

A node is JSON. None, bools, ints, finite floats and strings stand for themselves, a list for a
list. Every JSON object is tagged by its one or first key:

    {"array": name, "kind": ..., "dtype": ..., "shape": [...]}   a leaf, stored as an array
    {"dict": [[key, value], ...]}      also "OrderedDict" and "Counter"; keys are nodes too
    {"tuple": [...]}                   also "set" and "frozenset"
    {"namedtuple": [[field, value], ...], "type": ...}   read back as a dict
    {"pytree": [[key, value], ...], "type": ...}         other JAX nodes; read back as a dict
    {"float": hex}  {"int": hex}  {"complex": [re, im]}  {"bytes": base64}

The kind of a leaf says what it was: ``torchax`` and ``torch`` tensors, ``jax`` and ``numpy``
arrays, ``numpy_scalar``, or a ``key``, a typed JAX random key stored as its key data.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import functools
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
import torch

from torchax_ckpt import torchax_backend as backend
from torchax_ckpt.errors import CorruptCheckpointError, UnsupportedLeafError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Node

Array = jax.Array | np.ndarray
DEVICE_KINDS = frozenset({"torchax", "jax", "key"})

_MAPPINGS: Mapping[type, str] = {
    dict: "dict",
    collections.OrderedDict: "OrderedDict",
    collections.Counter: "Counter",
}
_SEQUENCES: Mapping[type, str] = {
    tuple: "tuple",
    torch.Size: "tuple",
    set: "set",
    frozenset: "frozenset",
}
_FROM_TAG: Mapping[str, Callable[[list[Any]], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": lambda pairs: collections.Counter(dict(pairs)),
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "namedtuple": dict,
    "pytree": dict,
}
_PAIRS = frozenset({"dict", "OrderedDict", "Counter", "namedtuple", "pytree"})
# Larger ints go through hex: other JSON readers round them, and Python limits decimal digits.
_MAX_PLAIN_INT = 2**53
_UNSTORABLE_DTYPES = frozenset("OSUVMm")


class Encoder:
    """Turns values into nodes and collects their leaves by name.

    Attributes:
      leaves: name -> the array itself. Device arrays are taken by reference, CPU tensors and
        numpy arrays, which can change in place, are copied.
    """

    def __init__(self) -> None:
        self.leaves: dict[str, Array] = {}

    def encode(self, value: Any, key_path: tuple[object, ...]) -> Node:
        """The node of a value; its leaves join ``leaves``, named by their key paths.

        Raises:
          UnsupportedLeafError: names the first part that cannot be stored, and why.
        """
        return self.encode_all([(key_path, value)])[0]

    def encode_all(self, items: Iterable[tuple[tuple[object, ...], Any]]) -> list[Node]:
        """The nodes of many (key path, value); switches to native torch once for all of them."""
        key_path: tuple[object, ...] = ()
        nodes = []
        with backend.native_torch():
            try:
                for key_path, value in items:
                    nodes.append(self._encode(value, key_path))
            except RecursionError:
                raise UnsupportedLeafError(
                    f"{names.join(key_path)}: nested too deeply, or contains itself",
                    key_path=names.join(key_path),
                ) from None
        return nodes

    def _encode(self, value: Any, path: tuple[object, ...]) -> Node:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_MAX_PLAIN_INT < value < _MAX_PLAIN_INT else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if isinstance(value, (torch.Tensor, jax.Array, np.ndarray, np.generic)):
            return self._leaf(value, path)
        if kind is list:
            return [self._encode(v, (*path, i)) for i, v in enumerate(value)]
        if kind in _MAPPINGS:
            parts = _distinct([str(k) for k in value])
            return {
                _MAPPINGS[kind]: [
                    [self._encode(k, path), self._encode(v, (*path, part))]
                    for part, (k, v) in zip(parts, value.items(), strict=True)
                ]
            }
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: [self._encode(v, (*path, i)) for i, v in enumerate(value)]}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {
                "namedtuple": [
                    [f, self._encode(v, (*path, f))]
                    for f, v in zip(value._fields, value, strict=True)
                ],
                "type": kind.__qualname__,
            }
        if kind is complex:
            return {"complex": [self._encode(value.real, path), self._encode(value.imag, path)]}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if not jax.tree_util.all_leaves([value]):
            children, _ = jax.tree_util.tree_flatten_with_path(
                value, is_leaf=lambda child: child is not value
            )
            return {
                "pytree": [
                    [part, self._encode(child, (*path, part))]
                    for part, child in ((key_part(key), child) for (key,), child in children)
                ],
                "type": kind.__qualname__,
            }
        raise UnsupportedLeafError(
            f"{names.join(path)}: a {kind.__module__}.{kind.__qualname__} cannot be stored. Stored "
            "are tensors, arrays, numbers, strings, bytes, None, and dicts, lists, tuples and "
            "sets of them: keep the rest out of the state, or convert it.",
            key_path=names.join(path),
        )

    def _leaf(self, value: Any, path: tuple[object, ...]) -> Node:
        name = names.join(path)
        spec = describe(value, name)
        array = freeze(value, name)
        if name in self.leaves:
            raise UnsupportedLeafError(f"{name}: two leaves have this name", key_path=name)
        self.leaves[name] = array
        return spec.node(name)


def freeze(value: Any, name: str) -> Array:
    """The array of a leaf, as it is now: device arrays by reference, host arrays copied.

    Call it within ``torchax_backend.native_torch``, on values that ``describe`` accepts.
    """
    if isinstance(value, torch.Tensor):
        if backend.is_device_tensor(value):
            return backend.buffer(value)
        if value.is_meta:
            raise UnsupportedLeafError(
                f"{name}: is on the meta device and holds no data; attach the module, so that a "
                "checkpoint or `init` fills it",
                key_path=name,
            )
        return backend.to_numpy(value)
    if isinstance(value, jax.Array):
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(value) if is_key else value
    return np.array(value)


def freeze_all(tensors: Sequence[torch.Tensor], name: str) -> list[Array]:
    """``freeze`` for many tensors; 0-d CPU tensors of one dtype are copied together."""
    with backend.native_torch():
        counters = backend.scalars_to_numpy(
            [t for t in tensors if t.ndim == 0 and not backend.is_device_tensor(t)]
        )
        return [
            counters[key] if (key := id(tensor)) in counters else freeze(tensor, name)
            for tensor in tensors
        ]


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a leaf is, apart from its content: kind, dtype, shape (of the stored array), impl."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    impl: str | None = None

    def node(self, name: str) -> dict[str, Any]:
        """The array node of a leaf of this spec."""
        node = {"array": name, "kind": self.kind, "dtype": self.dtype, "shape": list(self.shape)}
        if self.impl is not None:
            node["impl"] = self.impl
        return node

    @classmethod
    def of_node(cls, node: Mapping[str, Any]) -> Spec:
        """The spec in an array node."""
        return cls(node["kind"], node["dtype"], tuple(node["shape"]), node.get("impl"))

    @property
    def on_device(self) -> bool:
        """Whether such a leaf lives on devices."""
        return self.kind in DEVICE_KINDS

    @property
    def nbytes(self) -> int:
        """Its size in bytes, over all devices."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def content(self) -> str:
        """Dtype and shape, as they stand in messages."""
        impl = f" ({self.impl})" if self.impl else ""
        return f"{self.dtype}{list(self.shape)}{impl}"


@functools.cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """numpy's or ml_dtypes' name of a dtype; numpy computes it anew at every access."""
    return dtype.name


def describe(value: Any, name: str) -> Spec:
    """The spec of a tensor or array; of a ``jax.ShapeDtypeStruct`` too.

    Raises:
      UnsupportedLeafError: it cannot be stored as it is.
    """

    def refuse(why: str) -> UnsupportedLeafError:
        return UnsupportedLeafError(f"{name}: {why}", key_path=name)

    if isinstance(value, torch.Tensor):
        if why := backend.why_unsupported(value):
            raise refuse(why)
        if backend.is_device_tensor(value):
            array = backend.buffer(value)
            return Spec("torchax", dtype_name(array.dtype), tuple(array.shape))
        return Spec("torch", dtype_name(backend.numpy_dtype(value.dtype)), tuple(value.shape))
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        if isinstance(value, jax.core.Tracer):
            raise refuse("is a JAX tracer; save outside of jit, grad and other transformations")
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            data = jax.eval_shape(jax.random.key_data, value)
            impl = str(jax.random.key_impl(cast(jax.Array, value)))
            return Spec("key", dtype_name(data.dtype), tuple(data.shape), impl)
        return Spec("jax", dtype_name(value.dtype), tuple(value.shape))
    if value.dtype.kind in _UNSTORABLE_DTYPES and value.dtype.name not in _ML_DTYPES:
        raise refuse(f"has numpy dtype {value.dtype}, which is not numeric")
    if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
        raise refuse(f"is a {type(value).__name__}, a subclass of numpy.ndarray")
    kind = "numpy_scalar" if isinstance(value, np.generic) else "numpy"
    return Spec(kind, dtype_name(value.dtype), tuple(value.shape))


# numpy reports kind "V" for the types that ml_dtypes adds.
_ML_DTYPES = frozenset(
    ["bfloat16", "int4", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
     "float8_e4m3b11fnuz", "float8_e8m0fnu", "float4_e2m1fn"]
)  # fmt: skip


def decode(node: Node, leaf: Callable[[Mapping[str, Any]], Any]) -> Any:
    """The value of a node; ``leaf`` gives the value of each array node.

    Raises:
      CorruptCheckpointError: the node has no known form.
    """
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    if isinstance(node, list):
        return [decode(child, leaf) for child in node]
    if isinstance(node, dict) and node:
        if "array" in node:
            return leaf(node)
        tag, payload = next(iter(node.items()))
        try:
            if tag in _PAIRS:
                pairs = [(decode(k, leaf), decode(v, leaf)) for k, v in payload]
                return _FROM_TAG[tag](pairs)
            if tag in _FROM_TAG:
                return _FROM_TAG[tag]([decode(child, leaf) for child in payload])
            if tag == "int":
                return int(payload, 16)
            if tag == "float":
                return struct.unpack(">d", bytes.fromhex(payload))[0]
            if tag == "complex":
                return complex(*(decode(part, leaf) for part in payload))
            if tag == "bytes":
                return base64.b64decode(payload, validate=True)
        except (TypeError, ValueError, struct.error) as error:
            if isinstance(error, CorruptCheckpointError):
                raise
            raise CorruptCheckpointError(
                f"malformed {tag!r} node in the manifest: {error}"
            ) from error
    raise CorruptCheckpointError(f"unknown node in the manifest: {str(node)[:80]}")


def navigate(node: Node, parts: Iterable[str]) -> Node:
    """The node found by following keys and indices down from this one.

    Raises:
      KeyError: there is no such node.
    """
    for part in parts:
        tag = next(iter(node), None) if isinstance(node, dict) else None
        if isinstance(node, list) or tag == "tuple":
            children = node if isinstance(node, list) else node["tuple"]
            if not part.isdecimal() or int(part) >= len(children):
                raise KeyError(part)
            node = children[int(part)]
        elif tag in _PAIRS:
            node = next((v for k, v in node[tag] if str(k) == part), KeyError)
            if node is KeyError:
                raise KeyError(part)
        else:
            raise KeyError(part)
    return node


def key_part(entry: Any) -> str:
    """The key of one step of a JAX key path, as it stands in names."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _distinct(parts: list[str]) -> list[str]:
    """The parts, told apart where two keys of one dict (1 and "1") look the same as text."""
    seen: collections.Counter[str] = collections.Counter()
    result = []
    for part in parts:
        seen[part] += 1
        result.append(part if seen[part] == 1 else f"{part}%{seen[part]}")
    return result
