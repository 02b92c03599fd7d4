"""Checks stored nodes, which are untrusted, before any live object is changed.

For a node that no component can have written, the functions raise CorruptCheckpointError only.
"""

from __future__ import annotations

from typing import Any

from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.layout.nodes import decode

# Kinds whose leaves can be members of sets or keys of dicts.
_HASHABLE_KINDS = frozenset({"torchax", "torch", "numpy_scalar"})


def check_values(node: Node, where: str) -> None:
    """Raises CorruptCheckpointError unless the node can be decoded; does not look at leaves."""
    try:
        decode(node, lambda leaf: leaf["array"] if leaf["kind"] in _HASHABLE_KINDS else [])
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{where}: {error}", key_path=where) from error


def fields(node: Node, where: str) -> dict[str, Node]:
    """Returns key -> child of a dict node with string keys, none of which occurs twice."""
    return named(node.get("dict") if isinstance(node, dict) else None, where)


def members(node: Node, where: str) -> dict[str, Node]:
    """Returns name -> node of what was attached as one component; {"": node} of a single object."""
    is_group = isinstance(node, dict) and node.get("group") is True
    return fields(node, where) if is_group else {"": node}


def named(pairs: Any, where: str) -> dict[str, Node]:
    """Returns name -> node of a list of [name, node] pairs, in which no name occurs twice."""
    found = _by_key(pairs, where)
    for name in found:
        if type(name) is not str:
            raise corrupt(where, "a name and a node", _kind(name))
    return found


def keyed(node: Node, where: str) -> dict[Any, Node]:
    """Returns key -> child of a dict node; its keys are hashable, no leaves, and occur once."""
    return _by_key(node.get("dict") if isinstance(node, dict) else None, where)


def _by_key(pairs: Any, where: str) -> dict[Any, Node]:
    if not isinstance(pairs, list):
        raise corrupt(where, "a list of nodes with keys", _kind(pairs))
    found: dict[Any, Node] = {}
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise corrupt(where, "a key and a node", _kind(pair))
        # Decode leaves to lists. Lists are unhashable, so a key that is a leaf is refused.
        key = pair[0]
        if type(key) is not str:
            key = decode({"tuple": [key]}, lambda leaf: [])[0]
        try:
            is_new = key not in found
        except TypeError:
            raise corrupt(where, "a hashable key", _kind(pair[0])) from None
        if not is_new:
            raise corrupt(where, "one node for each key", f"two of {key!r:.80}")
        found[key] = pair[1]
    return found


def leaves(node: Node, where: str) -> dict[str, Node]:
    """Returns key -> child of a dict node whose children are all array nodes."""
    found = fields(node, where)
    for name, child in found.items():
        if not (isinstance(child, dict) and "array" in child):
            raise corrupt(f"{where}/{names.escape(name)}", "a leaf", _kind(child))
    return found


def texts(values: Any, where: str) -> list[str]:
    """Returns ``values``, which must be a list of strings."""
    if not (isinstance(values, list) and all(isinstance(value, str) for value in values)):
        raise corrupt(where, "a list of names", _kind(values))
    return values


def corrupt(where: str, expected: str, found: str) -> CorruptCheckpointError:
    """Returns the error for a malformed node; its message has ``expected`` and ``found``."""
    return CorruptCheckpointError(
        f"{where}: expected {expected} in the manifest, found {found}", key_path=where
    )


def _kind(node: Any) -> str:
    return f"a {type(node).__name__}"
