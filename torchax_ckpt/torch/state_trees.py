"""The state in a step as torch's state dicts have it, and how it is compared with a program's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.formats.optimizer_state import state_dict_of
from torchax_ckpt.formats.state_dict import torch_dtype
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.layout.nodes import decode
from torchax_ckpt.plain_torch import native_torch, tensor_of
from torchax_ckpt.state import node_checks
from torchax_ckpt.state.findings import Findings
from torchax_ckpt.state.stored_entries import StoredModule, extra_state_key

LeafValue = Callable[[Mapping[str, Any]], Any]
"""Returns what stands for an array node."""

# .to("jax") narrows to 32 bits, so a program in plain PyTorch may have the wider dtype.
WIDER = {
    torch.int32: torch.int64,
    torch.uint32: torch.uint64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def tree_of(document: Mapping[str, Node], leaf: LeafValue) -> dict[str, Any]:
    """Returns component -> state as its ``state_dict()`` gives it, with optimizers keyed by name.

    A component of several attached objects is a dict of their states. In functional state, lists
    and tuples are dicts with the indices as keys, so that DCP gives every tensor a name.
    """
    tree = {name: _state(node, name, leaf) for name, node in document.items()}
    return tree | ({"state": _indexed(tree["state"])} if "state" in tree else {})


def _indexed(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        value = {str(index): child for index, child in enumerate(value)}
    return {k: _indexed(v) for k, v in value.items()} if isinstance(value, dict) else value


def _state(node: Node, where: str, leaf: LeafValue) -> Any:
    members = node_checks.members(node, where)
    if members.keys() != {""}:
        states = {n: _state(member, f"{where}/{n}", leaf) for n, member in members.items()}
        if members and all(isinstance(m, dict) and "class" in m for m in members.values()):
            with contextlib.suppress(CorruptCheckpointError):  # one parameter is in two of them
                return states | _state(_merged(members.values()), where, leaf)
        return states
    if isinstance(node, dict) and "ties" in node:
        state = module_state(node, where)
        return {name: decode(child, leaf) for name, child in state.items()}
    if isinstance(node, dict) and "class" in node:
        state_dict = state_dict_of(node, where, leaf, by_name=True)
        return state_dict | _flat_groups(state_dict["param_groups"])
    return decode(node, leaf)


def _merged(optimizers: Iterable[Node]) -> Node:
    """Returns the node of one optimizer with the groups and state of several, as DCP has them."""
    contents = [dict(node["dict"]) for node in optimizers]
    groups = [group for content in contents for group in content["param_groups"]]
    states = [state for content in contents for state in content["state"]["dict"]]
    return {"class": None, "dict": [["param_groups", groups], ["state", {"dict": states}]]}


def module_state(node: Node, where: str) -> dict[str, Node]:
    """Returns name in torch -> node of a module's tensors, under all names, and extra state."""
    module = StoredModule.of_node(node, where)
    ties = {alias: module.tensors[fqn] for alias, fqn in module.ties.items()}
    extra = {extra_state_key(path): child for path, child in (module.extra_state or {}).items()}
    return {**module.tensors, **ties, **extra}


def _flat_groups(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns hyperparameters under the names that ``flatten_optimizer_state_dict`` gives them."""
    return {
        f"param_groups.{name}.{key}": value
        for group in groups
        for name in group["params"]
        if not name.isdecimal()  # DCP gives these names to whole groups
        for key, value in group.items()
        if key != "params"
    }


def stand_in(node: Node) -> torch.Tensor | None:
    """Returns a tensor on the meta device for the node of one; None for that of another value."""
    if not isinstance(node, dict) or node.get("kind") in (None, "numpy", "numpy_scalar"):
        return None
    with native_torch():
        dtype = torch_dtype(node["dtype"], node["array"])
        return torch.empty(node["shape"], dtype=dtype, device="meta")


def revived(node: Mapping[str, Any], array: np.ndarray) -> Any:
    """Returns what the node of an array describes, without a copy."""
    if node["kind"] == "numpy_scalar":
        return array[()]
    if node["kind"] == "numpy":
        return array
    return tensor_of(array, torch_dtype(node["dtype"], node["array"]))


def compare(name: str, value: Any, stored: Any, findings: Findings) -> bool:
    """Returns whether a stored tensor or value can become the program's; records if not."""
    expected, found = _form(value), _form(stored)
    is_wider = expected and found and expected == (WIDER.get(found[0]), found[1])
    if expected != found and not is_wider:
        findings.mismatch(name, *map(_text, (expected, found)))
    return expected == found or bool(is_wider)


def _form(value: Any) -> tuple[torch.dtype, tuple[int, ...]] | None:
    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else None


def _text(form: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "a value that is no tensor" if form is None else f"{form[0]}{list(form[1])}"
