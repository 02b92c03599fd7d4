"""Owns how stored nodes are looked at before use: what is not as written is a corrupt checkpoint.

A manifest is data from elsewhere. Whoever reads a node by its parts does it here, so that nothing
but a CorruptCheckpointError comes of one that no component has written, and that it comes before
anything live is touched.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Node, array_nodes
from torchax_ckpt.state.component import revive
from torchax_ckpt.state.leaf import DEVICE_KINDS, Spec
from torchax_ckpt.state.pytree import decode

# Kinds whose leaves can be members of sets and keys of dicts.
_HASHABLE_KINDS = frozenset({"torchax", "torch", "numpy_scalar"})


def check_document(document: Mapping[str, Node]) -> None:
    """Raises CorruptCheckpointError unless every node can be read and every leaf be made again."""
    for component, node in document.items():
        check(node, component)


def check(node: Node, where: str) -> None:
    """Raises CorruptCheckpointError unless the node can be read and its leaves be made again.

    Args:
      node: any node.
      where: its name, for messages.
    """
    for child in array_nodes(node):
        spec = Spec.of_node(child)
        width = spec.shape[-1:] if spec.kind == "key" else ()
        if why := _why_not_made(spec.kind, spec.dtype, width, spec.impl, spec.is_weak):
            raise corrupt(child["array"], f"a {spec.kind} leaf that can be made", why)
    try:
        decode(node, lambda leaf: leaf["array"] if leaf["kind"] in _HASHABLE_KINDS else [])
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{where}: {error}", key_path=where) from error


@functools.lru_cache(maxsize=256)
def _why_not_made(
    kind: str, dtype: str, width: tuple[int, ...], impl: str | None, is_weak: bool
) -> str | None:
    """Why no leaf of this kind can be made of an array of this dtype; None if one can."""
    node = {"kind": kind, "impl": impl, "weak": is_weak}
    if sum(width) > 64:
        return f"random keys {width[0]} words wide"
    try:
        array: Any = np.zeros(width, np.dtype(dtype))
        revive(node, jax.device_put(array) if kind in DEVICE_KINDS else array)
    except Exception as error:  # JAX and torch refuse in many ways
        return f"{dtype}{'' if impl is None else f' ({impl!r:.40})'}: {error!s:.200}"
    return None


def fields(node: Node, where: str) -> dict[str, Node]:
    """Text -> node, of a dict node.

    Raises:
      CorruptCheckpointError: it is none, or a key is no text or there twice.
    """
    pairs = node.get("dict") if isinstance(node, dict) else None
    return named(pairs, where)


def named(pairs: Any, where: str) -> dict[str, Node]:
    """Text -> node, of a list of pairs; raises as ``fields`` does."""
    if not isinstance(pairs, list):
        raise corrupt(where, "a list of named nodes", _kind(pairs))
    found: dict[str, Node] = {}
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise corrupt(where, "a name and a node", _kind(pair))
        if pair[0] in found:
            raise corrupt(where, "one node of each name", f"two of {pair[0]!r:.80}")
        found[pair[0]] = pair[1]
    return found


def leaves(node: Node, where: str) -> dict[str, Node]:
    """Text -> array node, of a dict node; raises as ``fields`` does."""
    found = fields(node, where)
    for name, child in found.items():
        if not (isinstance(child, dict) and "array" in child):
            raise corrupt(f"{where}/{names.escape(name)}", "a leaf", _kind(child))
    return found


def named_texts(pairs: Any, where: str) -> dict[str, str]:
    """Text -> text, of a list of pairs; raises as ``fields`` does."""
    found = named(pairs, where)
    texts(list(found.values()), where)
    return found


def texts(values: Any, where: str) -> list[str]:
    """A list of texts; raises CorruptCheckpointError if it is none."""
    if not (isinstance(values, list) and all(isinstance(value, str) for value in values)):
        raise corrupt(where, "a list of names", _kind(values))
    return values


def keyed(node: Node, where: str) -> dict[Any, Node]:
    """Key -> node, of a dict node whose keys are anything that can be one.

    Raises:
      CorruptCheckpointError: it is none, or a key is a leaf, none at all, or there twice.
    """
    pairs = node.get("dict") if isinstance(node, dict) else None
    if not isinstance(pairs, list):
        raise corrupt(where, "a dict", _kind(node))
    found: dict[Any, Node] = {}
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise corrupt(where, "a key and a node", _kind(pair))
        # Leaves become lists here, which cannot be keys.
        key = decode({"tuple": [pair[0]]}, lambda leaf: [])[0]
        try:
            is_new = key not in found
        except TypeError:
            raise corrupt(where, "a key", _kind(pair[0])) from None
        if not is_new:
            raise corrupt(where, "one node of each key", f"two of {key!r:.80}")
        found[key] = pair[1]
    return found


def corrupt(where: str, expected: str, found: str) -> CorruptCheckpointError:
    """The error for a node that is not as any component writes it."""
    return CorruptCheckpointError(
        f"{where}: expected {expected} in the manifest, found {found}", key_path=where
    )


def _kind(node: Any) -> str:
    return f"a {type(node).__name__}"
