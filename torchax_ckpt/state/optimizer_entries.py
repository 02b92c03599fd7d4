"""Compares and rebuilds the single values of an optimizer, and finds the optimizer in a wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchax_ckpt import torchax_backend
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.state.component import Values, revive
from torchax_ckpt.state.findings import Findings
from torchax_ckpt.state.leaf import Spec, describe
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
    expected, found = describe(live, where), Spec.of_node(node)
    if (expected.dtype, expected.shape) == (found.dtype, found.shape):
        return True
    findings.mismatch(where, expected.content(), found.content())
    return False


def rebuild(node: Node, live: Any, values: Values) -> Any:
    """Returns the stored value; if it is a tensor with the spec of ``live``, fills ``live``."""

    def leaf(child: Mapping[str, Any]) -> Any:
        value = values[child["array"]]
        if child is node and isinstance(live, torch.Tensor):
            spec, here = Spec.of_node(child), describe(live, child["array"])
            if spec == here and spec.kind == "torchax":
                torchax_backend.set_buffer(live, value)
                return live
            if spec == here and spec.kind == "torch":
                torchax_backend.copy_into(live, value)
                return live
        return revive(child, value)

    return decode(node, leaf)
