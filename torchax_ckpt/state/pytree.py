"""Converts Python state to JSON nodes (see ``layout/nodes.py``) and named leaves, and back."""

from __future__ import annotations

import base64
import collections
import functools
import math
import re
import struct
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.extend.core.primitives import convert_element_type_p

from torchax_ckpt import torchax_backend
from torchax_ckpt.errors import UnsupportedLeafError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import MAX_DEPTH, MAX_ELEMENTS, Node, array_nodes
from torchax_ckpt.layout.nodes import FACTORIES, decode
from torchax_ckpt.layout.storage_plan import MAX_RANK
from torchax_ckpt.state import node_checks
from torchax_ckpt.state.leaf import DEVICE_KINDS, Array, array_of, describe
from torchax_ckpt.state.plans.restoration import Values

_MAPPINGS: Mapping[type, str] = {
    dict: "dict",
    collections.defaultdict: "dict",
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
# Two characters that JSON writes as it writes one other character.
_SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]")
# OCDBT's keys have at most 65,535 bytes; a key is a leaf's name and the indices of a chunk.
_MAX_NAME_BYTES = 64_000


class Encoder:
    """Converts Python values to nodes, and collects the leaves of the values by name."""

    def __init__(self) -> None:
        self.leaves: dict[str, Array] = {}  # host arrays are copied: they can change in place
        # (type, type that it comes back as) -> name of such a value
        self.changed: dict[tuple[str, str], str] = {}

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
                where = names.join(key_path)
                raise UnsupportedLeafError(
                    f"{where}: nested deeper than {MAX_DEPTH} levels, or contains itself",
                    key_path=where,
                ) from None
            except ValueError as error:  # raised for a key with more digits than Python writes
                where = names.join(key_path)
                raise UnsupportedLeafError(f"{where}: {error}", key_path=where) from error
        return nodes

    def note_change(self, value: Any, becomes: str, path: tuple[object, ...]) -> None:
        """Records that a value comes back as another type."""
        self.changed.setdefault((type(value).__qualname__, becomes), names.join(path))

    def _encode(self, value: Any, path: tuple[object, ...], *, is_hashed: bool = False) -> Node:
        """Returns the node of a value; what ``is_hashed`` is in a set, or in a key of a dict."""
        if len(path) > MAX_DEPTH:
            raise _TooDeepError
        kind = type(value)
        if kind is str:
            return _storable(value, path)
        if value is None or kind is bool:
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
            parts = names.key_texts(value)
            node: dict[str, Any] = {
                _MAPPINGS[kind]: [
                    [self._encode_key(k, path), self._encode(v, (*path, part))]
                    for part, (k, v) in zip(parts, value.items(), strict=True)
                ]
            }
            if kind is collections.defaultdict:
                factory = getattr(value.default_factory, "__name__", None)
                if FACTORIES.get(factory, object) is value.default_factory:
                    return {**node, "factory": factory}
                self.note_change(value, "dict", path)
            return node
        if kind is torch.Size:
            self.note_change(value, "tuple", path)
        if kind in _SEQUENCES:
            is_hashed |= kind in (set, frozenset)
            return {_SEQUENCES[kind]: self._encode_items(value, path, is_hashed=is_hashed)}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            self.note_change(value, "tuple" if is_hashed else "dict", path)
            if is_hashed:  # a dict could not be hashed when the value is read
                return {"tuple": self._encode_items(value, path, is_hashed=True)}
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
        # A node type registered with JAX, which is read as a dict.
        if not is_hashed and not jax.tree_util.all_leaves([value]):
            self.note_change(value, "dict", path)
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

    def _encode_items(
        self, values: Collection[Any], path: tuple[object, ...], *, is_hashed: bool = False
    ) -> list[Node]:
        # Python's random generator has a state of 625 ints. Do not encode them one by one.
        if set(map(type, values)) == {int} and max(map(abs, values)) < _MAX_PLAIN_INT:
            return list(values)
        return [self._encode(v, (*path, i), is_hashed=is_hashed) for i, v in enumerate(values)]

    def _encode_key(self, key: Any, path: tuple[object, ...], depth: int = 0) -> Node:
        """Returns the node of a dict key; the node of a numpy scalar contains its bytes."""
        if len(path) + depth > MAX_DEPTH:
            raise _TooDeepError
        if isinstance(key, np.generic):
            describe(key, names.join(path))
            return {"scalar": base64.b64encode(key.tobytes()).decode(), "type": key.dtype.name}
        if type(key) is tuple:
            return {"tuple": [self._encode_key(part, path, depth + 1) for part in key]}
        return self._encode(key, path, is_hashed=True)

    def _leaf(self, value: Any, path: tuple[object, ...]) -> Node:
        name = names.join(path)
        spec = describe(value, name)
        problem = ""
        if len(spec.shape) > MAX_RANK or math.prod(filter(None, spec.shape)) > MAX_ELEMENTS:
            problem = (
                f"has the shape {list(spec.shape)!r:.200}; storage holds arrays of at most "
                f"{MAX_RANK} dims{' (a random key has one more)' * (spec.kind == 'key')}, whose "
                f"product is at most {MAX_ELEMENTS}. Reshape it"
            )
        elif len(name.encode()) > _MAX_NAME_BYTES:
            problem = f"the name has more than {_MAX_NAME_BYTES} bytes, which no storage key can be"
            name = f"{name:.100}..."
        elif name in self.leaves:
            problem = "two leaves have this name"
        if problem:
            raise UnsupportedLeafError(f"{name}: {problem}", key_path=name)
        self.leaves[name] = array_of(value, name)
        if isinstance(value, torch.nn.Parameter):
            self.note_change(value, "Tensor", path)
        return spec.node(name)


class _TooDeepError(Exception):
    """A value is nested deeper than a manifest allows."""


def _storable(text: str, path: tuple[object, ...]) -> str:
    """Returns a text that JSON gives back as it is; else raises UnsupportedLeafError."""
    if not text.isascii() and _SURROGATES.search(text):
        raise UnsupportedLeafError(
            f"{names.join(path)}: {text!a:.80} has two halves of one character (surrogates), "
            "which would come back as that character. Store it as bytes: "
            'text.encode("utf-8", "surrogatepass")',
            key_path=names.join(path),
        )
    return text


def key_part(entry: Any) -> str:
    """Returns the text that stands in a leaf name for one entry of a JAX key path."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return names.key_text(getattr(entry, attribute))
    return str(entry)


# --- rebuilding --------------------------------------------------------------------------------


def value_of(node: Node, values: Values) -> Any:
    """Returns the Python value that a node describes, with the given arrays as its leaves."""
    return decode(node, lambda leaf: revive(leaf, values[leaf["array"]]))


def revive(node: Mapping[str, Any], value: Any) -> Any:
    """Converts a leaf's array to what the node describes: a tensor, array, scalar or PRNG key."""
    match node["kind"]:
        case "torchax":
            return torchax_backend.wrap(value)
        case "torch":
            return torchax_backend.from_numpy(value)
        case "key":
            return jax.random.wrap_key_data(value, impl=node["impl"])
        case "numpy_scalar":
            return value[()]
        case "jax" if node.get("weak"):
            # JAX's weak type: operations use the other operand's dtype.
            return convert_element_type_p.bind(
                value, new_dtype=value.dtype, weak_type=True, sharding=None
            )
        case _:
            return value


def check_document(document: Mapping[str, Node]) -> None:
    """Calls ``check`` for the node of each component."""
    for component, node in document.items():
        check(node, component)


def check(node: Node, where: str) -> None:
    """Raises CorruptCheckpointError unless the node can be decoded and its leaves rebuilt."""
    for child in array_nodes(node):
        kind, is_weak = child["kind"], bool(child.get("weak"))
        width = tuple(child["shape"][-1:]) if kind == "key" else ()
        if why := _why_not_rebuilt(kind, child["dtype"], width, child.get("impl"), is_weak):
            raise node_checks.corrupt(child["array"], f"a {kind} leaf that can be rebuilt", why)
    node_checks.check_values(node, where)


@functools.lru_cache(maxsize=256)
def _why_not_rebuilt(
    kind: str, dtype: str, width: tuple[int, ...], impl: str | None, is_weak: bool
) -> str | None:
    """Returns why an array of this dtype cannot become a leaf of this kind; None if it can."""
    node = {"kind": kind, "impl": impl, "weak": is_weak}
    if sum(width) > 64:
        return f"random keys {width[0]} words wide"
    try:
        array: Any = np.zeros(width, np.dtype(dtype))
        revive(node, jax.device_put(array) if kind in DEVICE_KINDS else array)
    except Exception as error:  # JAX and torch raise many types
        return f"{dtype}{'' if impl is None else f' ({impl!r:.40})'}: {error!s:.200}"
    return None
