"""Captures pytrees; loads functional state, any pytree that a training step takes and returns."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import torch

from torchax_ckpt import torchax_backend
from torchax_ckpt.devices.sharding import Local, Placement, over_devices, placement_of
from torchax_ckpt.errors import MismatchError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import MAX_DEPTH, Node, array_nodes
from torchax_ckpt.layout.nodes import is_leaf, nodes_by_path
from torchax_ckpt.state.component import (
    Captured,
    Form,
    LeafRead,
    add_read,
    encoded,
    require_alive,
)
from torchax_ckpt.state.findings import Findings
from torchax_ckpt.state.leaf import Spec, array_of, describe
from torchax_ckpt.state.plans.restoration import Values
from torchax_ckpt.state.pytree import Encoder, key_part, value_of

KEY_PATH = ("state",)
# The types of leaves that are compared by value. A pytree with many of them is described faster
# than it is compared.
_PLAIN, _MAX_PLAIN = frozenset((int, bool, str, bytes)), 1000
_NODES = (dict, list, tuple)
_DICTS = (dict, collections.defaultdict)
_SORTABLE: tuple[set[type], ...] = (set(), {str}, {int})  # types of the keys of one dict
_ARRAYS = (torch.Tensor, jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)


class PytreeCapture:
    """Captures a pytree at each save; builds no nodes if its form stayed the same for two saves."""

    def __init__(self, key_path: tuple[str, ...] = KEY_PATH) -> None:
        self._key_path = key_path
        self._where = names.join(key_path)
        self._signature: Any = None
        self._form = Form(None, ())
        self._order: list[int] | None = None

    def capture(self, state: Any) -> Captured:
        """Captures the pytree; UnsupportedLeafError if a leaf cannot be stored or was donated."""
        leaves, signature = _flattened(state)
        is_known = signature is not None and _equal(signature, self._signature)
        if is_known and self._order is not None:
            device_array, chosen = _device_array(), [leaves[i] for i in self._order]
            with torchax_backend.native_torch():
                arrays = [
                    leaf if type(leaf) is device_array else array_of(leaf, self._where)
                    for leaf in chosen
                ]
            captured = Captured(self._form, arrays)
        else:
            captured = encoded(state, self._key_path)
            # A state that differs at each save, such as a counter, never pays for the order.
            order = self._positions(state, captured.form) if is_known else None
            self._signature, self._form, self._order = signature, captured.form, order
        require_alive(captured)
        return captured

    def _positions(self, state: Any, form: Form) -> list[int] | None:
        """Returns the position of each of the form's leaves in the flattened pytree, or None."""
        paths, _ = jax.tree_util.tree_flatten_with_path(state)
        position = {
            names.join((*self._key_path, *map(key_part, path))): i
            for i, (path, _) in enumerate(paths)
        }
        found = [position.get(name) for name in form.names]
        return None if None in found else found  # type: ignore[return-value]


def _flattened(state: Any) -> tuple[list[Any], Any]:
    """Returns a pytree's leaves and its signature; equal signatures (not None) have equal nodes."""
    if (orders := _orders(state)) is None:
        return [], None
    try:
        leaves, treedef = jax.tree_util.tree_flatten(state)
    except (TypeError, ValueError):  # raised by the class of a node of the pytree
        return [], None
    device_array = _device_array()
    with torchax_backend.native_torch():  # torchax would dispatch each question of a tensor
        marks = [
            leaf.aval if type(leaf) is device_array else _signature_of(leaf) for leaf in leaves
        ]
    return leaves, None if None in marks else (treedef, orders, marks)


@functools.cache
def _device_array() -> Any:
    """Returns the class of device arrays, which neither tracers nor random keys have."""
    # isinstance(leaf, jax.Array) takes much longer.
    return type(jax.device_put(np.zeros((), np.int32)))


def _orders(state: Any) -> list[Any] | None:
    """Returns the keys of all dicts of a pytree, each in its order, which a dict keeps when stored.

    None for a pytree that JAX's flatten must not, or need not, see: in JAX 0.10.2, each error for
    unsortable keys or too deep nesting shortens this thread's allowed recursion for good.
    """
    orders: list[Any] = []
    num_plain = 0
    stack = [(state, 0)]
    while stack:
        node, depth = stack.pop()
        children: Iterable[Any] = node
        if isinstance(node, dict):
            keys = tuple(node)
            if len(kinds := {*map(type, keys)}) > 1 or not kinds <= {str, int}:
                return None
            orders.append(keys)
            children = node.values()
        elif not isinstance(node, (list, tuple)):
            continue
        first = next(iter(children), None)
        if depth > MAX_DEPTH or (len(node) > _MAX_PLAIN and type(first) in _PLAIN):
            return None
        kinds = set(map(type, children))
        if _PLAIN.isdisjoint(kinds) and not any(issubclass(kind, _NODES) for kind in kinds):
            continue  # arrays only
        for child in children:
            if isinstance(child, _NODES):
                stack.append((child, depth + 1))
            elif type(child) in _PLAIN:
                num_plain += 1
        if num_plain > _MAX_PLAIN:
            return None
    return orders


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # the user's classes of nodes may hold objects that cannot be compared
        return False


def _signature_of(leaf: Any) -> Any:
    """Returns the signature of a leaf; None for types that none can describe, such as floats."""
    if isinstance(leaf, jax.Array):
        return type(leaf), leaf.aval  # shape, dtype and weak type; arrays share these objects
    if isinstance(leaf, torch.Tensor):
        return type(leaf), leaf.shape, leaf.dtype, leaf.layout, leaf.device
    if isinstance(leaf, _ARRAYS):
        return type(leaf), leaf.shape, leaf.dtype
    # Equal values of these types have equal nodes. Floats are left out because 0.0 == -0.0, and
    # sets because they can change in place.
    return (type(leaf), leaf) if type(leaf) in _PLAIN else None


def _tag(node: Node) -> str:
    """Returns what tells the type of the value that a node represents; ints and floats are one."""
    if isinstance(node, dict):
        tag = next(iter(node))
        return "number" if tag in ("int", "float") else tag
    return "number" if type(node) in (int, float) else type(node).__name__


class Request:
    """What ``load`` reads for an abstract state (None: all as saved), and builds of it.

    A state ``is_foreign`` if bare Orbax saved it: it may have more than the abstract state, and
    does not say of an array that it is a random key.
    """

    def __init__(
        self,
        root: Node,
        abstract_state: Any,
        prefix: tuple[str, ...],
        findings: Findings,
        *,
        is_foreign: bool,
    ) -> None:
        self.reads: dict[str, LeafRead] = {}
        self._root = root
        self._is_foreign = is_foreign
        self._abstract = abstract_state = _sortable(abstract_state)
        self._nodes: list[Node] = []
        if abstract_state is None:
            self._read_all(root)
            return
        stored = nodes_by_path(root)
        wanted: set[tuple[str, ...]] = set()
        for entries, abstract in jax.tree_util.tree_flatten_with_path(abstract_state)[0]:
            path = tuple(map(key_part, entries))
            wanted.add(path)
            name = names.join((*prefix, *path))
            if path in stored:
                self._nodes.append(self._match(stored[path], name, abstract, findings))
            else:
                findings.missing.append(name)
        for path, node in () if is_foreign else stored.items():
            if is_leaf(node) and not any(path[:n] in wanted for n in range(len(path) + 1)):
                is_array = isinstance(node, dict) and "array" in node
                findings.unexpected.append(
                    node["array"] if is_array else names.join((*prefix, *path))
                )

    def _match(self, node: Node, name: str, abstract: Any, findings: Findings) -> Node:
        """Adds the reads of one leaf of the abstract state; returns the node of the result."""
        if not isinstance(abstract, _ARRAYS):
            if _tag(Encoder().encode(abstract, names.split(name))) != _tag(node):
                findings.mismatch(name, f"a {type(abstract).__name__}", _form(node))
            else:
                self._read_all(node)
            return node
        expected = describe(abstract, name)
        if not (isinstance(node, dict) and "array" in node):
            findings.mismatch(name, expected.content(), _form(node))
            return node
        found = Spec.of_node(node)
        result = dataclasses.replace(found, kind=expected.kind)
        if self._is_foreign:
            result = dataclasses.replace(result, impl=expected.impl, is_weak=expected.is_weak)
        if dataclasses.replace(result, is_weak=expected.is_weak) != expected:
            findings.mismatch(name, expected.content(), found.content())
            return node
        add_read(self.reads, node, _placement(abstract, expected, name))
        return result.node(node["array"])

    def _read_all(self, root: Node) -> None:
        for node in array_nodes(root):
            on_device = Spec.of_node(node).on_device
            add_read(self.reads, node, Local.DEFAULT_DEVICE if on_device else Local.HOST)

    def build(self, values: Values) -> Any:
        """Returns the loaded state, built from the arrays that were read."""
        if self._abstract is None:
            return value_of(self._root, values)
        treedef = jax.tree_util.tree_structure(self._abstract)
        return jax.tree_util.tree_unflatten(treedef, [value_of(n, values) for n in self._nodes])


@jax.tree_util.register_pytree_with_keys_class
class _Unsorted(dict[Any, Any]):
    """A dict whose keys JAX cannot sort; when unflattened, it is a plain dict again."""

    def tree_flatten_with_keys(self) -> Any:
        parts = map(jax.tree_util.DictKey, names.key_texts(self))
        return list(zip(parts, self.values(), strict=True)), tuple(self)

    @classmethod
    def tree_unflatten(cls, keys: tuple[Any, ...], children: Iterable[Any]) -> dict[Any, Any]:
        return dict(zip(keys, children, strict=True))


def _sortable(node: Any, depth: int = 0) -> Any:
    """Returns a pytree in which the dicts that JAX might fail to sort are ``_Unsorted``.

    Raises MismatchError for one that is nested deeper than any saved one.
    """
    # In JAX 0.10.2, an error for too deep nesting shortens this thread's recursion for good.
    if depth > MAX_DEPTH:
        why = f"nested deeper than {MAX_DEPTH} levels, or contains itself"
        raise MismatchError(f"abstract_state: {why}", mismatched={"abstract_state": why})
    if type(node) in _DICTS and {*map(type, node)} not in _SORTABLE:
        return _Unsorted({key: _sortable(child, depth + 1) for key, child in node.items()})
    is_root = iter([True])
    children, treedef = jax.tree_util.tree_flatten(node, lambda _: not next(is_root, False))
    if jax.tree_util.treedef_is_leaf(treedef):
        return node
    children = [_sortable(child, depth + 1) for child in children]
    return jax.tree_util.tree_unflatten(treedef, children)


def _placement(abstract: Any, spec: Spec, name: str) -> Placement:
    if not spec.on_device:
        return Local.HOST
    if isinstance(abstract, jax.ShapeDtypeStruct):
        if abstract.sharding is None:
            return Local.DEFAULT_DEVICE
        return over_devices(abstract.sharding, name, "abstract_state")
    array = torchax_backend.buffer(abstract) if spec.kind == "torchax" else abstract
    if spec.kind == "key" and not isinstance(array, jax.core.Tracer) and not array.is_deleted():
        array = jax.random.key_data(array)
    return placement_of(array)


def _form(node: Node) -> str:
    if isinstance(node, dict) and "array" in node:
        return Spec.of_node(node).content()
    return "a list" if isinstance(node, list) else f"{node!r:.60}"
