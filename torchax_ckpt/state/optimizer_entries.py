"""Compares and rebuilds the single values of an optimizer, and finds the optimizer in a wrapper."""

from __future__ import annotations

from typing import Any

import torch

from torchax_ckpt import torchax_backend
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.snapshot.sharding import Local, Placement, placement_of, replicated_like
from torchax_ckpt.state.component import Values, revive
from torchax_ckpt.state.findings import Findings
from torchax_ckpt.state.leaf import DEVICE_KINDS, Spec, describe
from torchax_ckpt.state.pytree import decode


def unwrapped(value: Any) -> Any:
    """Returns the optimizer in a wrapper that has no state of its own; other objects as they are.

    ``AcceleratedOptimizer`` of accelerate and ``LightningOptimizer`` are such wrappers: their
    ``state`` and ``param_groups`` are those of the optimizer in their attribute ``optimizer``. An
    optimizer such as Lookahead, which adds state to that of another, is not.
    """
    inner = getattr(value, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer) or inner is value:
        return value
    shared = all(getattr(value, n, None) is getattr(inner, n) for n in ("state", "param_groups"))
    return unwrapped(inner) if shared else value


def other_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Returns the state that an optimizer keeps under keys that are not parameters.

    torch's ``Optimizer.state_dict`` keeps such state as it is.
    """
    return {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}


def same(a: Node, b: Node) -> bool:
    """Returns whether two nodes of one hyperparameter, from two stored groups, are equal.

    If the hyperparameter is a tensor, returns False even if the tensors are equal, because a node
    does not contain the values of a tensor.
    """
    return a == b


def compatible(node: Node, live: Any, where: str, findings: Findings) -> bool:
    """Returns whether a stored value can replace the live value; if not, records a mismatch.

    If the stored value is an array and the live value a tensor, their dtypes and shapes must be
    equal. In all other cases the stored value can replace the live value.
    """
    if not isinstance(live, torch.Tensor) or not (isinstance(node, dict) and "array" in node):
        return True
    expected = describe(live, where)
    if (expected.dtype, expected.shape) == (node["dtype"], tuple(node["shape"])):
        return True
    findings.mismatch(where, expected.content(), Spec.of_node(node).content())
    return False


def rebuild(node: Node, live: Any, values: Values) -> Any:
    """Returns the stored value; if it is a tensor with the spec of ``live``, fills ``live``."""
    if isinstance(live, torch.Tensor) and isinstance(node, dict) and "array" in node:
        spec, value = Spec.of_node(node), values[node["array"]]
        if spec == describe(live, node["array"]):
            if spec.on_device:
                torchax_backend.set_buffer(live, value)
            else:
                torchax_backend.copy_into(live, value)
            return live
    return decode(node, lambda leaf: revive(leaf, values[leaf["array"]]))


def leaf_placement(
    node: Node, live: Any, parameter_shape: tuple[int, ...] | None, home: Placement
) -> Placement:
    """Returns where a restore puts a leaf of an optimizer.

    Args:
      node: the array node of the leaf.
      live: the value that the leaf replaces, if any.
      parameter_shape: the shape of the parameter whose state the leaf belongs to; None without one.
      home: the placement of this parameter, or of a parameter of the group.
    """
    if node["kind"] not in DEVICE_KINDS:
        return Local.HOST
    if tuple(node["shape"]) == parameter_shape:
        return home
    if isinstance(live, torch.Tensor) and torchax_backend.is_device_tensor(live):
        return placement_of(torchax_backend.buffer(live))
    return replicated_like(home)
