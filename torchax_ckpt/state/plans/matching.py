"""Compares stored modules and optimizers with live ones, for torchax and for plain torch.

Nothing is changed here. What differs goes into the findings of the plan; a ``Backend`` says whether
a stored leaf fits a live tensor, where it is read to, and what becomes of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, TypeVar

import torch

from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Node, array_nodes
from torchax_ckpt.runtime import user_messages
from torchax_ckpt.runtime.user_messages import counted
from torchax_ckpt.state import node_checks
from torchax_ckpt.state.findings import Findings, type_name
from torchax_ckpt.state.plans.restoration import Change, Restoration, Values, leaf_names
from torchax_ckpt.state.stored_entries import EXTRA_STATE, StoredModule, StoredOptimizer

T = TypeVar("T")


def match_members(
    live: Mapping[str, T], node: Node, key_path: tuple[str, ...], findings: Findings
) -> list[tuple[str, T, Node]]:
    """Returns the objects of one kind that were saved too, each with its name and node.

    The name is "" for one object that was given without a name.
    """
    where = names.join(key_path)
    stored = node_checks.members(node, where)
    for name in live:
        if name not in stored:
            findings.missing.append(names.join((*key_path, name)) if name else where)
    for name, child in stored.items():
        if name not in live:
            of_one = leaf_names(child) or [where]
            findings.unexpected += [names.join((*key_path, name))] if name else of_one
    return [(name, one, stored[name]) for name, one in live.items() if name in stored]


# --- modules -----------------------------------------------------------------------------------


def stored_module(node: Node, where: str, findings: Findings) -> StoredModule:
    """Parses what is stored for a module; nothing if another kind of object was saved."""
    if isinstance(node, dict) and "ties" in node:
        return StoredModule.of_node(node, where)
    findings.unexpected += leaf_names(node)
    return StoredModule({}, {})


def match_tensors(
    live: Iterable[tuple[str, Sequence[str], T]],
    stored: StoredModule,
    key_path: tuple[str, ...],
    findings: Findings,
    fits: Callable[[T, Node, str], bool],
) -> list[tuple[T, Node]]:
    """Returns the live tensors that the stored ones fit, each with the node of its stored value.

    ``live`` has for each tensor its first name in torch, all names that are restored, and what
    stands for it. ``fits`` records a tensor of another shape or dtype.
    """
    found: list[tuple[T, Node]] = []
    used: set[str] = set()
    for fqn, every_name, tensor in live:
        name, sources = names.join((*key_path, fqn)), stored.sources(every_name)
        if not sources:
            findings.missing.append(name)
            continue
        differing = stored.differing_ties(every_name, sources, used)
        used.update(sources)
        # If ties differ, nothing says which of several stored values a tensor gets.
        if differing is not None:
            here, there, lacks_ties = differing
            findings.mismatch(name, here, there)
            findings.lacks_ties |= lacks_ties
        elif fits(tensor, node := stored.tensors[sources[0]], name):
            found.append((tensor, node))
    findings.unexpected += [names.join((*key_path, n)) for n in stored.tensors if n not in used]
    return found


def extra_state_modules(root: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Returns path -> submodule, for submodules that override ``get_extra_state``."""
    return {
        names.without_compile(path): submodule
        for path, submodule in root.named_modules()
        if type(submodule).get_extra_state is not torch.nn.Module.get_extra_state
    }


def match_extra_state(
    modules: Mapping[str, torch.nn.Module],
    stored: StoredModule,
    key_path: tuple[str, ...],
    findings: Findings,
) -> list[tuple[torch.nn.Module, Node, tuple[str, ...]]]:
    """Returns the submodules, by path, that take stored extra state, with node and key path."""
    if stored.extra_state is None:
        return []
    found = []
    for path in dict.fromkeys((*modules, *stored.extra_state)):
        key = (*key_path, path, EXTRA_STATE)
        name, module = names.join(key), modules.get(path)
        if path not in stored.extra_state:
            findings.missing.append(name)
        elif module is None:
            findings.unexpected.append(name)
        elif type(module).set_extra_state is torch.nn.Module.set_extra_state:
            findings.mismatch(name, "a module with set_extra_state", type_name(module))
        else:
            found.append((module, stored.extra_state[path], key))
    return found


# --- optimizers --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Owner:
    """The parameter whose state a stored value is in, and its group.

    Without ``is_state`` the value is a hyperparameter, or state that belongs to no parameter. Then
    the parameter, if any, only says on which devices the value is put.
    """

    parameter: torch.Tensor | None
    group: Mapping[str, Any]
    is_state: bool


class Backend(Protocol):
    """What differs between torchax and plain torch when an optimizer is restored."""

    def fits(self, live: torch.Tensor, node: Node, name: str) -> bool:
        """Returns whether a stored value can replace a live tensor; if not, records a mismatch."""
        ...

    def add_read(self, leaf: Node, live: Any, owner: Owner) -> None:
        """Plans to read a leaf that takes the place of ``live``."""
        ...

    def rebuilt(self, node: Node, live: Any, values: Values, owner: Owner) -> Any:
        """Returns the value of a node, which takes the place of ``live`` or is ``live``, filled."""
        ...

    def release(self, live: Any) -> None:
        """Frees the memory of a device that a value takes."""
        ...


def match_optimizer(
    optimizer: torch.optim.Optimizer,
    node: Node,
    where: str,
    parameter_names: Callable[[], Mapping[int, Sequence[str]]],
    plan: Restoration,
    backend: Backend,
) -> None:
    """Compares a stored optimizer with the live one, and plans what it gets.

    ``parameter_names`` returns id of a parameter -> its names below ``model``. Parameters are
    matched by name; those that are not selected keep their state.
    """
    findings, selection = plan.findings, plan.selection
    if not (isinstance(node, dict) and "class" in node):
        findings.missing.append(where)
        findings.unexpected += leaf_names(node)
        return
    (stored_class,) = node_checks.texts([node["class"]], where)
    stored = StoredOptimizer.of_node(node, where)
    if groupless := stored.state.keys() - stored.group_of:
        number = counted(len(groupless), "parameter that was", "parameters that were")
        user_messages.warn(
            f"{where}: not restored: the state of {number} in no group when the step was saved, "
            f"such as {min(groupless)}. To keep such state, leave the group in the optimizer, and "
            "give its parameters no gradients"
        )
    stored = stored.selected(selection)
    if stored_class != (live_class := type(optimizer).__qualname__):
        findings.mismatch(where, live_class, stored_class)
        findings.has_other_optimizer = True
        return

    def write(
        entries: Mapping[Any, Node],
        live: Mapping[Any, Any],
        replace: Callable[[dict[Any, Any]], object],
        owner: Owner,
    ) -> None:
        for key, child in entries.items():
            for leaf in array_nodes(child):
                backend.add_read(leaf, live.get(key), owner)

        def do(values: Values) -> None:
            replace({k: backend.rebuilt(n, live.get(k), values, owner) for k, n in entries.items()})

        def release() -> None:
            for value in live.values() if owner.is_state else ():
                backend.release(value)

        needs = tuple(chain.from_iterable(map(leaf_names, entries.values())))
        plan.changes.append(Change(do, needs=needs, release=release))

    names_of = parameter_names()
    # A save may have named a tied parameter by another of its names.
    name_of = {
        key: next((n for n in every if n in stored.group_of), every[0])
        for key, every in names_of.items()
    }
    known: dict[str, torch.Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        members = {name_of[id(parameter)]: parameter for parameter in group["params"]}
        common, differing = stored.hyperparameters(members)
        for key, texts in differing.items():
            findings.mismatch(f"{where}/param_groups/{index}/{key}", *texts)
        if common:
            owner = Owner(group["params"][0], group, is_state=False)
            write(common, dict(group), group.update, owner)
        for name, parameter in members.items():
            if name not in stored.group_of:
                if selection.takes(name):
                    findings.missing.append(f"{where}/{name}")
                continue
            known[name] = parameter
            entries = node_checks.keyed(stored.state.get(name, {"dict": []}), f"{where}/{name}")
            live = optimizer.state.get(parameter) or {}
            # The module was compared first: its parameters that do not fit are recorded.
            model_name = f"model/{names_of[id(parameter)][0]}"
            if name in stored.state and model_name in findings.mismatched:
                expected = f"state of {model_name} as attached"
                found = f"state of {model_name} as stored, which differs"
                findings.mismatch(f"{where}/{name}", expected, found)
            elif _all_fit(entries, live, f"{where}/{name}", findings, backend):
                replace = functools.partial(_replace_state, optimizer, parameter)
                write(entries, live, replace, Owner(parameter, group, is_state=True))
    findings.unexpected += [f"{where}/{name}" for name in stored.group_of if name not in known]
    findings.left_out += [f"{where}/{name}" for name in stored.left_out]
    if known or not names_of:
        near = next(iter(known.values()), None)
        replace, live = functools.partial(_replace_other_state, optimizer), other_state(optimizer)
        write(stored.other_state, live, replace, Owner(near, {}, is_state=False))


def _all_fit(
    entries: Mapping[Any, Node],
    live: Mapping[Any, Any],
    where: str,
    findings: Findings,
    backend: Backend,
) -> bool:
    """Returns whether all stored entries fit the live state of a parameter; else none is taken."""
    unfit = [
        key
        for key, node in entries.items()
        if isinstance(live.get(key), torch.Tensor)
        and not backend.fits(live[key], node, f"{where}/{names.escape(str(key))}")
    ]
    if unfit and len(unfit) < len(entries):
        differing = ", ".join(map(str, unfit))
        findings.mismatch(where, "entries that all fit", f"differences in {differing}")
    return not unfit


def _replace_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, state: Mapping[Any, Any]
) -> None:
    if not state:
        optimizer.state.pop(parameter, None)
        return
    entry = optimizer.state[parameter]
    entry.clear()
    entry.update(state)


def other_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Returns the state under keys that are not parameters, which torch saves as it is."""
    return {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}


def _replace_other_state(optimizer: torch.optim.Optimizer, state: Mapping[Any, Any]) -> None:
    for key in other_state(optimizer):
        del optimizer.state[key]
    optimizer.state.update(state)
