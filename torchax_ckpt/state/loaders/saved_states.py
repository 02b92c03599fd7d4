"""The states of a loader on all processes that saved a step, for another number of processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.state import node_checks

LOADER = "dataloader"
# The key under which Grain's ElasticIterator keeps the position of all processes together.
_GLOBAL_POSITION = "global_next_index"


@dataclasses.dataclass(frozen=True)
class SavedStates:
    """The nodes of the loaders of all processes that saved a step.

    Attributes:
      nodes: one for each process that saved the step, in order.
      index, count: the process that restores the step, and the number of such processes.
    """

    nodes: tuple[Node, ...]
    index: int
    count: int

    def of_member(self, name: str, where: str) -> SavedStates:
        """Returns the nodes of one of several loaders, which were attached by name."""
        nodes = [node_checks.fields(node, where) for node in self.nodes]
        if missing := [i for i, members in enumerate(nodes) if name not in members]:
            raise node_checks.corrupt(where, f"{name} of every process", f"none of {missing[0]}")
        return dataclasses.replace(self, nodes=tuple(members[name] for members in nodes))

    def share(self, states: Sequence[Any]) -> Any:
        """Returns this process's state of those that the user's ``redistribute`` returned.

        Raises:
          ValueError: there is not one state for each process.
        """
        if len(states) != self.count:
            raise ValueError(
                f"redistribute returned {len(states)} states, expected {self.count}, one for each "
                "process"
            )
        return states[self.index]


def is_elastic(nodes: Sequence[Node]) -> bool:
    """Returns whether any of these states restores the loader on any number of processes.

    The states of Grain's ElasticIterator are equal on all processes, and count the samples of all.
    """
    first = nodes[0]
    pairs = first.get("dict") if isinstance(first, Mapping) else None
    if not isinstance(pairs, list) or any(node != first for node in nodes):
        return False
    if first.get("group") is True:
        return all(isinstance(p, list) and len(p) == 2 and is_elastic([p[1]]) for p in pairs)
    return [pair[0] for pair in pairs if isinstance(pair, list) and pair] == [_GLOBAL_POSITION]
