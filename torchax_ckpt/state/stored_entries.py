"""Parses what is stored for modules, optimizers and schedulers, in checkpoints or weight files."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torchax_ckpt.errors import SelectionError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.layout.nodes import decode
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.state import node_checks
from torchax_ckpt.state.findings import Findings

EXTRA_STATE = "_extra_state"
SCHEDULER = "lr_scheduler"
# The key for a scheduler's class, beside its state.
SCHEDULER_CLASS = "scheduler"
# The attribute, and the key of the state, under which torch's schedulers have those that they run.
_INNER = "_schedulers"


@dataclasses.dataclass(frozen=True)
class StoredModule:
    """The tensors, ties and extra state that are stored for one module, by torch's names."""

    tensors: Mapping[str, Node]  # name -> array node
    ties: Mapping[str, str]  # alias -> name in ``tensors``
    # path of a submodule -> node; None if the source has no extra state: then none is missing
    extra_state: Mapping[str, Node] | None = None
    # False for files of other programs, which record no ties: a live tensor may have any, if those
    # of its names that are stored refer to one stored tensor that no other live tensor takes.
    are_ties_known: bool = True
    # (stored dtype, live dtype) -> whether the stored tensor may be read as the live dtype
    converts: Callable[[str, str], bool] = operator.eq

    @classmethod
    def of_node(cls, node: Mapping[str, Node], where: str) -> StoredModule:
        """Parses a module's node; raises CorruptCheckpointError if it is malformed."""
        ties = node_checks.named(node["ties"], f"{where}/ties")
        node_checks.texts([*ties.values()], f"{where}/ties")
        extra = node_checks.named(node["extra_state"], where) if "extra_state" in node else None
        return cls(node_checks.leaves(node, where), ties, extra)

    def as_state_dict(self) -> Node:
        """Returns the node of the dict that ``Module.state_dict()`` returned."""
        tied = {alias: self.tensors[name] for alias, name in self.ties.items()}
        extra = {extra_state_key(path): node for path, node in (self.extra_state or {}).items()}
        return {"dict": [[k, v] for k, v in {**self.tensors, **tied, **extra}.items()]}

    def selected(self, selection: Selection, prefix: tuple[str, ...]) -> StoredModule:
        """Returns the selected entries, under their names in the program.

        A tied tensor is selected by any of its names; the first that is selected becomes its name.
        Raises SelectionError if two tensors would have one name, or one would change its module.
        """

        def selected_names(fqns: Iterable[str], ties: Mapping[str, str]) -> dict[str, str]:
            name_of = {fqn: names.join((*prefix, fqn)) for fqn in (*fqns, *ties.values())}
            by_name = {name_of[fqn]: fqn for fqn in fqns}
            found = selection.taken(by_name, {name_of[a]: name_of[n] for a, n in ties.items()})
            return {by_name[n]: _fqn(n, new, prefix) for n, new in found.items()}

        every = selected_names([*self.tensors, *self.ties], self.ties)
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
            for key, new in selected_names(by_key, {}).items()
        }
        return dataclasses.replace(self, tensors=tensors, ties=ties, extra_state=extra_state)

    def sources(self, every_name: Iterable[str]) -> list[str]:
        """Returns the stored tensors that names refer to; several if only the module ties them."""
        owners = [self.ties.get(name, name) for name in every_name]
        return list(dict.fromkeys(owner for owner in owners if owner in self.tensors))

    def differing_ties(
        self, every_name: Iterable[str], sources: Iterable[str], used: Collection[str]
    ) -> tuple[str, str, bool] | None:
        """Returns a live tensor's ties and those of its sources as texts; None if they agree.

        The flag says whether the sources have names that the live tensor lacks.
        """
        groups = [{s, *(alias for alias, fqn in self.ties.items() if fqn == s)} for s in sources]
        expected = set(every_name)
        if self.are_ties_known:
            are_alike = groups == [expected]
        else:
            are_alike = len(groups) == 1 and not groups[0] & set(used)
        if are_alike:
            return None
        has_more = any(group - expected for group in groups)
        return _tied(expected), ", ".join(_tied(group) for group in groups), has_more


def _fqn(old: str, new: str, prefix: tuple[str, ...]) -> str:
    """Returns torch's name in ``new``, a tensor's name after the renaming, without ``prefix``."""
    with contextlib.suppress(ValueError):  # an escape that is not valid UTF-8
        *model, fqn = names.split(new)
        if tuple(model) == prefix:
            return fqn
    form = f"{names.join(prefix)}/ followed by torch's name" if prefix else "torch's name alone"
    raise SelectionError(
        f"rename: {old} of the checkpoint would become {new}: expected {form} as the new name. "
        "Inside the names of model and tensor, write %25 for %, %2F for / and %2A for *. To take "
        "another model's weights, use warm_start(at=...)",
        key_path=old,
    )


def as_state_dict(node: Node, where: str) -> Node:
    """Returns the state dict of a stored module, or of each of several; others unchanged."""
    if isinstance(node, dict) and "ties" in node:
        return StoredModule.of_node(node, where).as_state_dict()
    if isinstance(node, dict) and node.get("group") is True:
        return {"dict": [[name, as_state_dict(child, where)] for name, child in node["dict"]]}
    return node


def extra_state_key(path: str) -> str:
    """Returns torch's key in a state dict for the extra state of a submodule."""
    return f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE


def path_of_key(key: str) -> str:
    """Returns the path of the submodule whose extra state has this key; see ``extra_state_key``."""
    return key.removesuffix(EXTRA_STATE).removesuffix(".")


def _tied(group: Iterable[str]) -> str:
    first, *rest = sorted(group)
    return f"{first} tied to {', '.join(rest)}" if rest else f"{first} on its own"


# Keys of a group whose values list its parameters in order. A restore ignores the order: it matches
# parameters by name.
BY_POSITION = frozenset({"params", "param_names"})
# The key of the state that an optimizer keeps under keys that are not parameters.
OTHER_STATE = "other_state"


@dataclasses.dataclass(frozen=True)
class StoredOptimizer:
    """The stored parameter groups and the stored state of one optimizer."""

    groups: Sequence[Mapping[Any, Node]]  # the hyperparameters of each
    group_of: Mapping[str, int]  # by parameter
    state: Mapping[str, Node]  # by parameter that had state
    left_out: tuple[str, ...] = ()  # not selected or in no group, by names in the program
    # by the keys that are no parameters
    other_state: Mapping[Any, Node] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_node(cls, node: Node, where: str) -> StoredOptimizer:
        """Parses an optimizer's node; raises CorruptCheckpointError if it is malformed."""
        content = node_checks.fields(node, where)
        described = content.get("param_groups")
        if not isinstance(described, list):
            raise node_checks.corrupt(
                f"{where}/param_groups", "a list", f"a {type(described).__name__}"
            )
        groups: list[Mapping[Any, Node]] = []
        group_of: dict[str, int] = {}
        for index, group in enumerate(described):
            place = f"{where}/param_groups/{index}"
            found = node_checks.keyed(group, place)
            groups.append({k: v for k, v in found.items() if k not in BY_POSITION})
            for member in node_checks.texts(found.get("params"), f"{place}/params"):
                if member in group_of:
                    expected = "one group that contains it"
                    raise node_checks.corrupt(f"{where}/{member}", expected, "two")
                group_of[member] = index
        return cls(
            groups,
            group_of,
            node_checks.fields(content.get("state"), f"{where}/state"),
            other_state=node_checks.keyed(
                content.get(OTHER_STATE, {"dict": []}), f"{where}/{OTHER_STATE}"
            ),
        )

    def hyperparameters(
        self, members: Iterable[str]
    ) -> tuple[dict[Any, Node], dict[Any, tuple[str, str]]]:
        """Returns what the stored groups of a live group's parameters have in common, by key.

        The second result is key -> (expected, found) of what they do not have in common.
        """
        sources = dict.fromkeys(self.group_of[m] for m in members if m in self.group_of)
        if not sources:
            return {}, {}
        first, *others = (self.groups[index] for index in sources)
        differing = {
            key
            for other in others
            for key in first.keys() | other.keys()
            # Tensors differ even if they are equal, because a node has no values.
            if first.get(key) != other.get(key)
        }
        found = f"different values: its parameters come from stored groups {sorted(sources)}"
        return (
            {key: node for key, node in first.items() if key not in differing},
            dict.fromkeys(sorted(differing, key=str), ("one value for the group", found)),
        )

    def selected(self, selection: Selection) -> StoredOptimizer:
        """Returns the selected parameters' groups and state, under their names in the program."""
        chosen = selection.taken(self.group_of)
        return StoredOptimizer(
            self.groups,
            {name: self.group_of[old] for old, name in chosen.items()},
            {name: self.state[old] for old, name in chosen.items() if old in self.state},
            tuple(selection.renamed(name) for name in self.state if name not in chosen),
            self.other_state,
        )


def scheduler_class(scheduler: Any) -> str:
    """Returns the name of a scheduler's class, with those of the schedulers that it runs."""
    # ``scheduler`` is the attribute of accelerate's wrapper.
    inner = getattr(scheduler, _INNER, None) or [getattr(scheduler, "scheduler", None)]
    found = [each for each in inner if hasattr(each, "state_dict") and each is not scheduler]
    name = type(scheduler).__qualname__
    return f"{name}({', '.join(map(scheduler_class, found))})" if found else name


def takes(scheduler: Any, live: Any, stored: Any, where: str, findings: Findings) -> bool:
    """Returns whether an object with the state ``live`` takes a stored state.

    Records a mismatch if the stored state is that of another class of schedulers, because torch's
    ``load_state_dict`` takes any state. (Those of loaders and users' objects can refuse one.) A
    scheduler that has all keys of the state nevertheless takes it: it may have a new name.
    """
    if not (isinstance(stored, Mapping) and SCHEDULER_CLASS in stored):
        return True
    (found,) = node_checks.texts([stored[SCHEDULER_CLASS]], where)
    if found == (expected := scheduler_class(scheduler)):
        return True
    findings.has_other_scheduler = True
    findings.mismatch(where, expected, found)
    return _has_keys(live, decode(stored, lambda leaf: None))


def _has_keys(live: Any, stored: Any) -> bool:
    if not (isinstance(live, Mapping) and isinstance(stored, Mapping)):
        return False
    inner = live.get(_INNER), stored.get(_INNER)
    ours, theirs = (part if isinstance(part, list) else [] for part in inner)
    is_alike = stored.keys() <= live.keys() and len(ours) == len(theirs)
    return is_alike and all(map(_has_keys, ours, theirs))
