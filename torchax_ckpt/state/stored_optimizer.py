"""Owns what a checkpoint holds for an optimizer: groups and state, by names of parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.state import checks

# Lists beside each other, in the group's own order; parameters are matched by name instead.
BY_POSITION = frozenset({"params", "param_names"})


@dataclasses.dataclass(frozen=True)
class StoredGroup:
    """Hyperparameters of one stored parameter group: name -> node, without ``params``."""

    index: int
    hyperparameters: Mapping[str, Node]


@dataclasses.dataclass(frozen=True)
class StoredOptimizer:
    """An optimizer as it is stored.

    Attributes:
      groups: all of them, in order.
      group_of: parameter -> its group.
      state: parameter -> the node of its state, where it had any.
    """

    groups: tuple[StoredGroup, ...]
    group_of: Mapping[str, StoredGroup]
    state: Mapping[str, Node]

    @classmethod
    def of_node(cls, node: Node, where: str) -> StoredOptimizer:
        """What an optimizer's node says; raises CorruptCheckpointError if it is not one."""
        content = checks.fields(node, where)
        described = content.get("param_groups")
        if not isinstance(described, list):
            raise checks.corrupt(f"{where}/param_groups", "a list", f"a {type(described).__name__}")
        groups: list[StoredGroup] = []
        group_of: dict[str, StoredGroup] = {}
        for index, group in enumerate(described):
            found = checks.fields(group, f"{where}/param_groups/{index}")
            stored = StoredGroup(index, {k: v for k, v in found.items() if k not in BY_POSITION})
            groups.append(stored)
            for member in checks.texts(found.get("params"), f"{where}/param_groups/{index}/params"):
                if member in group_of:
                    raise checks.corrupt(f"{where}/{member}", "one group with it", "two")
                group_of[member] = stored
        return cls(tuple(groups), group_of, checks.fields(content.get("state"), f"{where}/state"))

    def selected(self, selection: Selection) -> StoredOptimizer:
        """The parameters that are selected, under the names they are to have."""
        taken = selection.taken(self.group_of)
        return StoredOptimizer(
            self.groups,
            {name: self.group_of[old] for old, name in taken.items()},
            {name: self.state[old] for old, name in taken.items() if old in self.state},
        )
