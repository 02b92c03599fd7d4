"""Owns optimizers in the form of torch's own state dicts, without the parameters they step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torchax_ckpt.errors import MismatchError
from torchax_ckpt.layout.manifest import Node, array_nodes
from torchax_ckpt.state import node_checks
from torchax_ckpt.state.pytree import decode
from torchax_ckpt.state.stored_entries import StoredOptimizer
from torchax_ckpt.stored.stored_step import StoredLeaf, StoredStep

OPTIMIZER = "optimizer"


@dataclasses.dataclass(frozen=True)
class Optimizers:
    """The optimizers of a step.

    Attributes:
      nodes: name -> its node; the one that was attached has the name "".
      leaves: what has to be read for them.
    """

    nodes: Mapping[str, Node]
    leaves: tuple[StoredLeaf, ...]

    def state_dicts(self, tensor: Callable[[str], Any], *, by_name: bool) -> dict[str, Any]:
        """torch's state dict of the optimizer; of several, theirs by name.

        Args:
          tensor: gives a leaf by its name.
          by_name: whether parameters go by their names, as torch's DCP has them, or by their
            positions, as ``optimizer.load_state_dict`` does.

        Raises:
          CorruptCheckpointError: a node is not as one is written.
        """
        made = {
            name: _state_dict(node, OPTIMIZER, tensor, by_name=by_name)
            for name, node in self.nodes.items()
        }
        return made.get("", made)


def optimizers_of(stored: StoredStep) -> Optimizers:
    """The attached optimizers of a step.

    Raises:
      MismatchError: none was attached.
      CorruptCheckpointError: the manifest does not describe them as this package does.
    """
    node = stored.manifest.document.get(OPTIMIZER)
    if not isinstance(node, dict):
        raise MismatchError(
            f"step {stored.committed.step} in {stored.committed.path}: expected an attached "
            "optimizer, found none",
            missing=(OPTIMIZER,),
            step=stored.committed.step,
            path=stored.committed.path,
        )
    nodes = node_checks.fields(node, OPTIMIZER) if node.get("group") is True else {"": node}
    leaves = [stored.leaves[child["array"]] for n in nodes.values() for child in array_nodes(n)]
    return Optimizers(nodes, tuple(leaves))


def _state_dict(
    node: Node, where: str, tensor: Callable[[str], Any], *, by_name: bool
) -> dict[str, Any]:
    optimizer = StoredOptimizer.of_node(node, where)
    key_of = {name: name if by_name else i for i, name in enumerate(optimizer.group_of)}

    def made(child: Node) -> Any:
        return decode(child, lambda leaf: tensor(leaf["array"]))

    return {
        "state": {
            key_of[name]: {
                k: made(v) for k, v in node_checks.keyed(state, f"{where}/{name}").items()
            }
            for name, state in optimizer.state.items()
            if name in key_of
        },
        "param_groups": [
            {
                **{key: made(value) for key, value in group.hyperparameters.items()},
                "params": [key_of[n] for n, g in optimizer.group_of.items() if g is group],
            }
            for group in optimizer.groups
        ],
    }
