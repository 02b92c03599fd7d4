"""Owns what a checkpoint, or files, hold for a module and for an optimizer.

For a module: tensors, ties, extra state. For an optimizer: groups and state, by parameter names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Mapping

from torchax_ckpt.errors import SelectionError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.state import node_checks

EXTRA_STATE = "_extra_state"


@dataclasses.dataclass(frozen=True)
class StoredModule:
    """Tensors for one module, by torch's names.

    Attributes:
      tensors: name -> array node, whose own name says what to read.
      ties: another name of a tensor -> the name that it stands under in ``tensors``.
      extra_state: path of a submodule -> node; None: there is none to be had, nor is it missed.
      are_ties_known: whether ``ties`` are all that there are. Files of other programs do not say:
        then whatever stands for one tensor may be one.
      converts: whether a tensor of the one dtype may be read as the other; never, by default.
    """

    tensors: Mapping[str, Node]
    ties: Mapping[str, str]
    extra_state: Mapping[str, Node] | None = None
    are_ties_known: bool = True
    converts: Callable[[str, str], bool] = operator.eq

    @classmethod
    def of_node(cls, node: Mapping[str, Node], where: str) -> StoredModule:
        """What a module's node says; raises CorruptCheckpointError if it is not one."""
        return cls(
            node_checks.leaves(node, where),
            node_checks.named_texts(node["ties"], where),
            node_checks.named(node.get("extra_state"), where),
        )

    def selected(self, selection: Selection, prefix: tuple[str, ...]) -> StoredModule:
        """The part that is selected, under the names it is to have.

        A tied tensor is there as long as one of its names is; the first of them is its own.

        Args:
          selection: what is selected.
          prefix: keys before the module's names, where several are attached.

        Raises:
          SelectionError: two tensors would have the same name, or one would leave its module.
        """

        def taken(fqns: Iterable[str], ties: Mapping[str, str]) -> dict[str, str]:
            name_of = {fqn: names.join((*prefix, fqn)) for fqn in (*fqns, *ties.values())}
            by_name = {name_of[fqn]: fqn for fqn in fqns}
            found = selection.taken(by_name, {name_of[a]: name_of[n] for a, n in ties.items()})
            return {by_name[n]: _fqn(n, new, prefix) for n, new in found.items()}

        every = taken([*self.tensors, *self.ties], self.ties)
        tensors: dict[str, Node] = {}
        ties: dict[str, str] = {}
        first: dict[str, str] = {}
        for fqn, name in every.items():
            owner = self.ties.get(fqn, fqn)
            if owner in first and name not in tensors:
                ties[name] = first[owner]
            elif owner not in first and owner in self.tensors:
                first[owner] = name
                tensors[name] = self.tensors[owner]
        if self.extra_state is None:
            return dataclasses.replace(self, tensors=tensors, ties=ties)
        by_key = {extra_state_key(path): path for path in self.extra_state}
        extra_state = {
            path_of_key(new): self.extra_state[by_key[key]]
            for key, new in taken(by_key, {}).items()
        }
        return dataclasses.replace(self, tensors=tensors, ties=ties, extra_state=extra_state)

    def sources(self, every_name: Iterable[str]) -> list[str]:
        """The tensors that a live tensor's names stand for; several only if it is tied anew."""
        owners = [self.ties.get(name, name) for name in every_name]
        return list(dict.fromkeys(owner for owner in owners if owner in self.tensors))

    def differing_ties(
        self, every_name: Iterable[str], sources: Iterable[str], used: Collection[str]
    ) -> tuple[str, str] | None:
        """How a live tensor is tied and how its sources are, where one cannot be made of them.

        Args:
          every_name: the live tensor's names.
          sources: what they stand for.
          used: tensors that were taken for others already.
        """
        groups = [{s, *(alias for alias, fqn in self.ties.items() if fqn == s)} for s in sources]
        expected = set(every_name)
        if self.are_ties_known:
            are_alike = groups == [expected]
        else:
            are_alike = len(groups) == 1 and not groups[0] & set(used)
        if are_alike:
            return None
        return _tied(expected), ", ".join(_tied(group) for group in groups)


def _fqn(old: str, new: str, prefix: tuple[str, ...]) -> str:
    """torch's name in the name that a tensor is to have; raises SelectionError if it has none."""
    with contextlib.suppress(ValueError):  # of a % before what is no text
        *model, fqn = names.split(new)
        if tuple(model) == prefix:
            return fqn
    form = f"{names.join(prefix)}/ and torch's name" if prefix else "torch's name alone"
    raise SelectionError(
        f"rename: {old} of the checkpoint would be {new}: expected {form}, escaped; to take "
        "another model's weights, warm_start(at=...)",
        key_path=old,
    )


def extra_state_key(path: str) -> str:
    """torch's name of a submodule's extra state."""
    return f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE


def path_of_key(key: str) -> str:
    """Inverse of ``extra_state_key``."""
    return key.removesuffix(EXTRA_STATE).removesuffix(".")


def _tied(group: Iterable[str]) -> str:
    first, *rest = sorted(group)
    return f"{first} tied to {', '.join(rest)}" if rest else f"{first} on its own"


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
      left_out: parameters with state that are not selected, under the program's names.
    """

    groups: tuple[StoredGroup, ...]
    group_of: Mapping[str, StoredGroup]
    state: Mapping[str, Node]
    left_out: tuple[str, ...] = ()

    @classmethod
    def of_node(cls, node: Node, where: str) -> StoredOptimizer:
        """What an optimizer's node says; raises CorruptCheckpointError if it is not one."""
        content = node_checks.fields(node, where)
        described = content.get("param_groups")
        if not isinstance(described, list):
            raise node_checks.corrupt(
                f"{where}/param_groups", "a list", f"a {type(described).__name__}"
            )
        groups: list[StoredGroup] = []
        group_of: dict[str, StoredGroup] = {}
        for index, group in enumerate(described):
            found = node_checks.fields(group, f"{where}/param_groups/{index}")
            stored = StoredGroup(index, {k: v for k, v in found.items() if k not in BY_POSITION})
            groups.append(stored)
            for member in node_checks.texts(
                found.get("params"), f"{where}/param_groups/{index}/params"
            ):
                if member in group_of:
                    raise node_checks.corrupt(f"{where}/{member}", "one group with it", "two")
                group_of[member] = stored
        return cls(
            tuple(groups), group_of, node_checks.fields(content.get("state"), f"{where}/state")
        )

    def selected(self, selection: Selection) -> StoredOptimizer:
        """The parameters that are selected, under the names they are to have."""
        taken = selection.taken(self.group_of)
        return StoredOptimizer(
            self.groups,
            {name: self.group_of[old] for old, name in taken.items()},
            {name: self.state[old] for old, name in taken.items() if old in self.state},
            tuple(
                selection.renamed(name)
                for name in self.group_of
                if name in self.state and name not in taken
            ),
        )
