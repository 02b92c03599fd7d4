"""Converts Python state to a tree of JSON nodes (see ``layout/nodes.py``) plus named leaves."""

from __future__ import annotations

import base64
import collections
import itertools
import math
import struct
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import torch

from torchax_ckpt import torchax_backend
from torchax_ckpt.errors import UnsupportedLeafError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import MAX_DEPTH, Node
from torchax_ckpt.state.leaf import Array, describe, freeze

_MAPPINGS: Mapping[type, str] = {
    dict: "dict",
    collections.defaultdict: "dict",  # its factory is code, which is not stored
    collections.OrderedDict: "OrderedDict",
    collections.Counter: "Counter",
}
_SEQUENCES: Mapping[type, str] = {
    tuple: "tuple",
    torch.Size: "tuple",
    set: "set",
    frozenset: "frozenset",
}
# Larger ints are stored as hex: other JSON readers round them, and Python limits decimal digits.
_MAX_PLAIN_INT = 2**53


class Encoder:
    """Converts Python values to nodes, and collects the leaves of the values by name."""

    def __init__(self) -> None:
        self.leaves: dict[str, Array] = {}  # host arrays are copied: they can change in place

    def encode(self, value: Any, key_path: tuple[object, ...]) -> Node:
        """Returns the node of a value and adds its leaves; UnsupportedLeafError names the first."""
        return self.encode_all([(key_path, value)])[0]

    def encode_all(self, items: Iterable[tuple[tuple[object, ...], Any]]) -> list[Node]:
        """Does what ``encode`` does, for (key path, value) pairs."""
        key_path: tuple[object, ...] = ()
        nodes = []
        with torchax_backend.native_torch():
            try:
                for key_path, value in items:
                    nodes.append(self._encode(value, key_path))
            except (RecursionError, _TooDeepError):
                raise UnsupportedLeafError(
                    f"{names.join(key_path)}: nested too deeply, or contains itself",
                    key_path=names.join(key_path),
                ) from None
        return nodes

    def _encode(self, value: Any, path: tuple[object, ...]) -> Node:
        if len(path) > MAX_DEPTH:
            raise _TooDeepError
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
            return self._encode_items(value, path)
        if kind in _MAPPINGS:
            parts = _distinct([str(k) for k in value])
            return {
                _MAPPINGS[kind]: [
                    [self._encode_key(k, path), self._encode(v, (*path, part))]
                    for part, (k, v) in zip(parts, value.items(), strict=True)
                ]
            }
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: self._encode_items(value, path)}
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
        if not jax.tree_util.all_leaves([value]):  # a node type registered with JAX
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
            f"{names.join(path)}: a {kind.__module__}.{kind.__qualname__} cannot be stored. "
            "Tensors, arrays, numbers, strings, bytes, None, and dicts, lists, tuples and sets of "
            "them can be stored. Leave other values out of the state, or convert them.",
            key_path=names.join(path),
        )

    def _encode_items(self, values: Collection[Any], path: tuple[object, ...]) -> list[Node]:
        # Python's random generator has a state of 625 ints. Do not encode them one by one.
        if set(map(type, values)) == {int} and max(map(abs, values)) < _MAX_PLAIN_INT:
            return list(values)
        return [self._encode(v, (*path, i)) for i, v in enumerate(values)]

    def _encode_key(self, key: Any, path: tuple[object, ...], depth: int = 0) -> Node:
        """Returns the node of a dict key; the node of a numpy scalar contains its bytes."""
        if len(path) + depth > MAX_DEPTH:
            raise _TooDeepError
        if isinstance(key, np.generic):
            describe(key, names.join(path))
            return {"scalar": base64.b64encode(key.tobytes()).decode(), "type": key.dtype.name}
        if type(key) is tuple:
            return {"tuple": [self._encode_key(part, path, depth + 1) for part in key]}
        return self._encode(key, path)

    def _leaf(self, value: Any, path: tuple[object, ...]) -> Node:
        name = names.join(path)
        spec = describe(value, name)
        array = freeze(value, name)
        if name in self.leaves:
            raise UnsupportedLeafError(f"{name}: two leaves have this name", key_path=name)
        self.leaves[name] = array
        return spec.node(name)


class _TooDeepError(Exception):
    """A value is nested deeper than a manifest allows."""


def key_part(entry: Any) -> str:
    """Returns the text that stands in a leaf name for one entry of a JAX key path."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _distinct(parts: list[str]) -> list[str]:
    """Makes the texts of a dict's keys distinct: 1 and "1" become "1" and "1%2"."""
    if len(set(parts)) == len(parts):
        return parts
    used = set(parts)
    seen: set[str] = set()
    result = []
    for part in parts:
        name = part
        if part in seen:
            name = next(n for i in itertools.count(2) if (n := f"{part}%{i}") not in used)
            used.add(name)
        seen.add(part)
        result.append(name)
    return result
