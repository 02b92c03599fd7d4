"""Converts the optimizers in a step to dicts for ``Optimizer.load_state_dict``; needs no model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchax_ckpt.errors import MismatchError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.layout.nodes import decode
from torchax_ckpt.state import node_checks
from torchax_ckpt.state.stored_entries import StoredOptimizer
from torchax_ckpt.stored.stored_step import StoredStep

OPTIMIZER = "optimizer"


def optimizers_of(stored: StoredStep) -> dict[str, Node]:
    """Returns name -> node, "" for a single optimizer; MismatchError if none was attached."""
    node = stored.manifest.document.get(OPTIMIZER)
    if not isinstance(node, dict):
        raise MismatchError(
            f"step {stored.committed.step} in {stored.committed.path}: expected a step that was "
            "saved with an attached optimizer, found none. Leave out the optimizer, or use another "
            "step",
            missing=(OPTIMIZER,),
            step=stored.committed.step,
            path=stored.committed.path,
        )
    return node_checks.members(node, OPTIMIZER)


def _torch_names(parameters: Iterable[str]) -> dict[str, str]:
    """Returns torch's names by stored names; those of several models begin with the model's."""
    paths = {name: names.split(name) for name in parameters}
    start = 0 if len({path[:-1] for path in paths.values()}) > 1 else -1
    return {name: ".".join(path[start:]) for name, path in paths.items()}


def state_dict_of(
    node: Node, where: str, leaf: Callable[[Mapping[str, Any]], Any], *, by_name: bool
) -> dict[str, Any]:
    """Returns the state dict of one optimizer; ``leaf`` gives the value of each array node."""
    optimizer = StoredOptimizer.of_node(node, where)
    key_of: Mapping[str, Any] = _torch_names(optimizer.group_of)
    if not by_name:
        key_of = {name: index for index, name in enumerate(key_of)}

    return {
        "state": {
            key_of[name]: {
                k: decode(v, leaf) for k, v in node_checks.keyed(state, f"{where}/{name}").items()
            }
            for name, state in optimizer.state.items()
            if name in key_of
        }
        | {key: decode(child, leaf) for key, child in optimizer.other_state.items()},
        "param_groups": [
            {
                **{key: decode(value, leaf) for key, value in group.items()},
                "params": members,
                # DCP asks for them if the program called its optimizer with named_parameters().
                **({"param_names": [*members]} if by_name else {}),
            }
            for index, group in enumerate(optimizer.groups)
            for members in [[key_of[n] for n, at in optimizer.group_of.items() if at == index]]
        ],
    }
