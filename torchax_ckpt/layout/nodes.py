"""Decodes the nodes that describe Python values in a manifest.

A node is a JSON value. None, bools, ints, finite floats, strings and lists represent themselves.
The first key of a JSON object is its tag, which says what the object represents:

    {"array": name, "kind": ..., "dtype": ..., "shape": [...]}   a leaf, stored as an array
    {"dict": [[key, value], ...]}      also "OrderedDict" and "Counter"; keys are nodes too
    {"dict": [...], "factory": name}   a defaultdict
    {"tuple": [...]}                   also "set" and "frozenset"
    {"namedtuple": [[field, value], ...], "type": ...}   read back as a dict
    {"pytree": [[key, value], ...], "type": ...}         another JAX node type; read back as a dict
    {"float": hex}  {"int": hex}  {"complex": [re, im]}  {"bytes": base64}
"""

from __future__ import annotations

import base64
import collections
import math
import reprlib
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import MAX_DEPTH, STORABLE_DTYPES, Node

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
# The factories with which a defaultdict comes back; with others it comes back as a dict.
FACTORIES: Mapping[str | None, Callable[[], Any] | None] = {
    None: None,
    **{kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)},
}
_PAIRS = frozenset({"dict", "OrderedDict", "Counter", "namedtuple", "pytree"})
# The number of levels that components add around the states that they encode.
_COMPONENT_DEPTH = 16


def decode(node: Node, leaf: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Returns the Python value of a node; ``leaf`` gives the value of each array node."""
    return _decode(node, leaf, 0)


def _decode(node: Node, leaf: Callable[[Mapping[str, Any]], Any], depth: int) -> Any:
    if depth > MAX_DEPTH + _COMPONENT_DEPTH:
        raise CorruptCheckpointError(f"the manifest nests deeper than {MAX_DEPTH} levels")
    depth += 1
    if node is None or isinstance(node, (bool, int, str)):
        return node
    if isinstance(node, float) and math.isfinite(node):
        return node
    if isinstance(node, list):
        return [_decode(child, leaf, depth) for child in node]
    if isinstance(node, dict) and node:
        if "array" in node:
            return leaf(node)
        tag, payload = next(iter(node.items()))
        try:
            if tag in _FROM_TAG:
                if not isinstance(payload, list):
                    raise TypeError(f"expected a list, found a {type(payload).__name__}")
                if tag not in _PAIRS:
                    return _FROM_TAG[tag]([_decode(child, leaf, depth) for child in payload])
                if not all(isinstance(pair, list) and len(pair) == 2 for pair in payload):
                    raise TypeError("expected pairs")
                pairs = [(_decode(k, leaf, depth), _decode(v, leaf, depth)) for k, v in payload]
                if tag == "dict" and node.get("factory", "") in FACTORIES:
                    return collections.defaultdict(FACTORIES[node["factory"]], pairs)
                return _FROM_TAG[tag](pairs)
            if tag == "int":
                return int(payload, 16)
            if tag == "float":
                return struct.unpack(">d", bytes.fromhex(payload))[0]
            if tag == "scalar":
                dtype = node.get("type")
                if dtype not in STORABLE_DTYPES:
                    raise ValueError(f"unknown dtype {dtype!r:.40}")
                (scalar,) = np.frombuffer(base64.b64decode(payload, validate=True), np.dtype(dtype))
                return scalar
            if tag == "complex":
                real, imag = (_decode(part, leaf, depth) for part in payload)
                if type(real) is not float or type(imag) is not float:
                    raise TypeError("expected two floats")
                return complex(real, imag)
            if tag == "bytes":
                return base64.b64decode(payload, validate=True)
        except (TypeError, ValueError, struct.error) as error:
            if isinstance(error, CorruptCheckpointError):
                raise
            raise CorruptCheckpointError(
                f"malformed {tag!r} node in the manifest: {error}"
            ) from error
    raise CorruptCheckpointError(f"unknown node in the manifest: {reprlib.repr(node)}")


def nodes_by_path(root: Node) -> dict[tuple[str, ...], Node]:
    """Returns path -> node, parents first; keys are as in ``names.key_texts``."""
    by_path: dict[tuple[str, ...], Node] = {}

    def visit(node: Node, path: tuple[str, ...]) -> None:
        if path in by_path:
            return
        by_path[path] = node
        children: Iterable[tuple[str, Node]] = ()
        tag = next(iter(node), None) if isinstance(node, dict) else None
        if isinstance(node, list) or tag == "tuple":
            items = node if isinstance(node, list) else node["tuple"]
            children = ((str(index), child) for index, child in enumerate(items))
        elif tag in _PAIRS:
            keys, nodes = zip(*node[tag], strict=True) if node[tag] else ((), ())
            children = zip(names.key_texts(map(key_of, keys)), nodes, strict=True)
        for part, child in children:
            visit(child, (*path, part))

    visit(root, ())
    return by_path


def selected(
    node: Node, path: tuple[str, ...], takes: Callable[[str], bool]
) -> tuple[Node] | tuple[()]:
    """Returns the part of a node that ``takes`` selects by name, or () if it selects nothing.

    A value has the name of its path, an array that of its leaf too. A list of numbers and texts,
    such as the betas of an optimizer, is one value, and so is an empty dict. A list of lists
    without arrays and keys is one value, and each of its parts is one too. Dicts lack what is not
    selected; lists and tuples have None in its place, so that the others keep their positions.
    """
    tag = next(iter(node), None) if isinstance(node, dict) else None
    if tag == "array":
        return (node,) if takes(node["array"]) or takes(names.join(path)) else ()
    if tag in _PAIRS and node[tag]:
        keys = names.key_texts(key_of(key) for key, _ in node[tag])
        pairs = [
            [key, part]
            for text, (key, child) in zip(keys, node[tag], strict=True)
            for part in selected(child, (*path, text), takes)
        ]
        factory = {key: node[key] for key in ("factory",) if key in node}
        return ({tag: pairs, **factory},) if pairs else ()
    if takes(names.join(path)) and _is_value(node):
        return (node,)
    children = node if isinstance(node, list) else node["tuple"] if tag == "tuple" else ()
    if any(isinstance(child, dict | list) for child in children):
        parts = [selected(child, (*path, str(i)), takes) for i, child in enumerate(children)]
        if not any(parts):
            return ()
        found = [part[0] if part else None for part in parts]
        return (found if isinstance(node, list) else {"tuple": found},)
    return ()


def _is_value(node: Node) -> bool:
    """Returns whether a node has no arrays and no dicts with keys."""
    tag = next(iter(node), None) if isinstance(node, dict) else None
    if tag == "array" or (tag in _PAIRS and node[tag]):
        return False
    children = node if isinstance(node, list) else node["tuple"] if tag == "tuple" else ()
    return all(map(_is_value, children))


def is_leaf(node: Node) -> bool:
    """Returns whether a node is an array or a plain value; None counts as no value."""
    if isinstance(node, dict):
        tag = next(iter(node), None)
        return tag != "tuple" and tag not in _PAIRS
    return node is not None and not isinstance(node, list)


def key_of(node: Node) -> Any:
    """Returns the key of a dict whose node is given; CorruptCheckpointError if it is malformed."""
    return decode(node, lambda leaf: None) if isinstance(node, dict) else node
