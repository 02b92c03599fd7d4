"""Captures and restores all attached objects; a document maps each component to its node."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import jax
import torch

from torchax_ckpt import torchax_backend
from torchax_ckpt.devices.device_programs import copied
from torchax_ckpt.devices.sharding import Placement, auto_axes, resolve_rule
from torchax_ckpt.errors import AttachError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import IMPORTED, Node
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.runtime import user_messages
from torchax_ckpt.state import functional
from torchax_ckpt.state.component import Captured, Combined
from torchax_ckpt.state.findings import type_name
from torchax_ckpt.state.leaf import Array
from torchax_ckpt.state.modules.module import Init, ModuleComponent, Rule
from torchax_ckpt.state.modules.ties import warn_of_lost_ties
from torchax_ckpt.state.optimizer import OptimizerComponent, unwrapped
from torchax_ckpt.state.per_process_state import (
    COMPONENTS,
    PerProcessState,
    SavedStates,
    state_dict_hint,
)
from torchax_ckpt.state.plans import matching
from torchax_ckpt.state.plans.restoration import Restoration, leaf_names
from torchax_ckpt.state.random_state import RandomStateComponent
from torchax_ckpt.state.stateful import Redistribute, StatefulComponent

FUNCTIONAL = functional.KEY_PATH[0]
# The functional state, if there is one, replaces these components.
_TRAINED = ("model", "optimizer")


class TrainingState:
    """The attached components by name, ``rng`` last.

    ``attached`` has the objects that ``attach`` was given, by the names of its arguments; the other
    arguments are as in ``attach``.
    """

    def __init__(
        self,
        attached: Mapping[str, Any] | None = None,
        *,
        shardings: Any = None,
        init: Init | None = None,
        rng: bool = True,
        redistribute: Redistribute | None = None,
    ) -> None:
        require_callable("redistribute", redistribute)
        self.redistributes = redistribute is not None
        self.was_trained = False  # whether an optimizer had state when it was attached
        rule = as_rule(shardings)
        require_callable("init", init)
        self._modules: list[ModuleComponent] = []
        self.components: dict[str, Component] = {}
        self._rng = rng
        self._name_parts: list[Any] = []
        self._names: Mapping[int, tuple[tuple[str, ...], ...]] = {}
        self._functional = functional.PytreeCapture()
        self._warned_of: set[tuple[str, str]] = set()  # component and type

        def module(value: Any, path: tuple[str, ...]) -> Component:
            require_module(value, path)
            self._modules.append(ModuleComponent(value, path, rule, init))
            warn_of_lost_ties(value, path)
            return self._modules[-1]

        def stepper(value: Any, path: tuple[str, ...]) -> Component:
            value = unwrapped(value)
            if not isinstance(value, torch.optim.Optimizer):
                raise _wrong_type(path, "a torch.optim.Optimizer", value)
            self.was_trained |= bool(value.state)
            return OptimizerComponent(value, path, self._parameter_names, self._placements)

        loader = functools.partial(StatefulComponent, redistribute=redistribute)
        given = {name: value for name, value in (attached or {}).items() if value is not None}
        if "lr_scheduler" in given:
            given["lr_scheduler"] = _as_mapping(given["lr_scheduler"])
        for name, build in (
            ("model", module),
            ("optimizer", stepper),
            ("lr_scheduler", StatefulComponent),
            ("dataloader", loader),
            ("stateful", StatefulComponent),
        ):
            if name in given:
                self.components[name] = _component(name, given[name], build)
        if rng:
            self.components["rng"] = RandomStateComponent()

    def names(self) -> tuple[str, ...]:
        """Returns the names of the components and of their members: ``model``, ``model/a``."""
        return tuple(chain.from_iterable(map(self._names_of, self.components)))

    def _names_of(self, name: str) -> list[str]:
        component = self.components[name]
        members = component.members if isinstance(component, _Group) else ()
        return [name, *(names.join((name, member)) for member in members)]

    def _parameter_names(self) -> Mapping[int, tuple[tuple[str, ...], ...]]:
        parts = [module.parameter_names() for module in self._modules]
        if [id(part) for part in parts] != [id(part) for part in self._name_parts]:
            self._name_parts = parts
            merged: dict[int, tuple[tuple[str, ...], ...]] = {}
            for part in parts:
                for key, paths in part.items():
                    merged[key] = (*merged.get(key, ()), *paths)
            self._names = merged
        return self._names

    def _placements(self) -> dict[int, Placement]:
        return {k: v for module in self._modules for k, v in module.placements().items()}

    def capture(self, state: Any = None) -> dict[str, Captured]:
        """Captures all components; functional ``state`` replaces modules and optimizers."""
        captured: dict[str, Captured] = {}
        if state is not None:
            captured[FUNCTIONAL] = self._functional.capture(state)
        for name, component in self.components.items():
            if state is None or name not in _TRAINED:
                captured[name] = component.capture()
                self._warn_of_types(name, captured[name].form.changed)
        return captured

    def _warn_of_types(self, component: str, changed: Mapping[tuple[str, str], str]) -> None:
        """Warns once of each type of a component's state that comes back as another type."""
        for (kind, becomes), name in changed.items():
            if (component, kind) not in self._warned_of:
                self._warned_of.add((component, kind))
                user_messages.warn(
                    f"{name}: a value of the type {kind} comes back as a {becomes}, because a step "
                    "holds no code of the program. Convert it in the object's state_dict, and back "
                    "where the object loads its state"
                )

    def frozen(self) -> frozenset[str]:
        """Returns the leaf names of the modules' parameters that do not require gradients."""
        return frozenset(
            module.name(slot.fqn)
            for module in self._modules
            for slot in module.slots()
            if isinstance(slot.tensor, torch.nn.Parameter) and not slot.tensor.requires_grad
        )

    def prepare(
        self,
        document: Mapping[str, Node],
        selection: Selection | None,
        attached: Collection[str] | None = None,
    ) -> Restoration:
        """Compares a stored document with the attached objects; refuses unused patterns.

        ``attached`` are the names of what functional state took the place of; None if not recorded.
        """
        plan = Restoration(selection or Selection())
        findings, is_replaced = plan.findings, FUNCTIONAL in document
        findings.state = document.get(FUNCTIONAL)
        for name, component in self.components.items():
            if name in document:
                component.prepare(document[name], plan)
            elif is_replaced and name in _TRAINED:
                known = self._names_of(name) if attached is None else attached
                lacking = [n for n in self._names_of(name) if n not in known]
                findings.missing += [name] if name in lacking else lacking
                findings.unrestored += [name] * (attached is None)
            elif IMPORTED not in document:
                findings.missing.append(name)
        for name, node in document.items():
            if name in self.components or name in (FUNCTIONAL, IMPORTED):
                continue
            if name == "rng" and not self._rng:
                continue
            findings.unexpected += leaf_names(node) or [name]
            findings.unattached.append(name)
        plan.selection.require_used()
        return plan

    def prepare_fresh(self) -> Restoration:
        """Returns the plan of a start without checkpoint: fill meta tensors, shard by the rule."""
        plan = Restoration()
        for module in self._modules:
            module.prepare_fresh(plan)
        return plan


def split(captured: Mapping[str, Captured]) -> tuple[list[str], list[Array], PerProcessState]:
    """Returns the names and arrays of the leaves that a step stores once, and the other state."""
    shared: dict[str, Array] = {}
    local: dict[str, Array] = {}
    for component, part in captured.items():
        for name, array in part.by_name().items():
            if component not in COMPONENTS:
                shared[name] = array
            elif not isinstance(array, jax.Array):
                local[name] = array
            elif array.is_fully_addressable:
                local[name] = copied(array)  # a later step may donate the original
            else:
                shared[name] = array
    nodes = {name: part.form.node for name, part in captured.items() if name in COMPONENTS}
    return list(shared), list(shared.values()), PerProcessState(nodes, local)


class _Group:
    """Joins components of one kind, such as all schedulers, under the names the user gave them."""

    def __init__(self, members: Mapping[str, Component], key_path: tuple[str, ...]) -> None:
        self.members = members
        self._key_path = key_path
        self._combined = Combined(self._node)

    def _node(self, nodes: list[Node]) -> Node:
        pairs = zip(self.members, nodes, strict=True)
        return {"dict": [list(pair) for pair in pairs], "group": True}

    def capture(self) -> Captured:
        return self._combined([member.capture() for member in self.members.values()])

    def prepare(self, node: Node | SavedStates, plan: Restoration) -> None:
        states = node if isinstance(node, SavedStates) else None
        where = names.join(self._key_path)
        first = node if states is None else states.nodes[0]
        for name, member, child in matching.match_members(
            self.members, first, self._key_path, plan.findings
        ):
            member.prepare(child if states is None else states.of_member(name, where), plan)


Component = ModuleComponent | OptimizerComponent | StatefulComponent | RandomStateComponent | _Group


def _component(
    name: str, value: Any, build: Callable[[Any, tuple[str, ...]], Component]
) -> Component:
    if not isinstance(value, Mapping):
        return build(value, (name,))
    members = {}
    for key, member in value.items():
        if not isinstance(key, str):
            raise AttachError(f"{name}: names must be strings, found {key!r:.80}")
        try:
            members[key] = build(member, (name, key))
        except AttachError as error:
            error.message += state_dict_hint(value)
            raise
    return _Group(members, (name,))


def _as_mapping(value: Any) -> Any:
    """Converts a list to a dict with the keys "0", "1", ...; returns any other value unchanged."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return {str(index): member for index, member in enumerate(value)}
    return value


def as_rule(shardings: Any) -> Rule | None:
    """Converts ``shardings`` (a callable, mesh or None) to a rule; else raises AttachError."""
    if shardings is None:
        return None
    if found := torchax_backend.torchax_mesh(shardings):
        mesh, sharder = found
        return functools.partial(resolve_rule, sharder, auto_axes(mesh))
    # A jax.sharding.Mesh can be called, but as the decorator that it is too.
    if not callable(shardings) or isinstance(shardings, jax.sharding.Mesh):
        raise AttachError(
            "shardings: expected a callable from name and abstract leaf to a Sharding or "
            "PartitionSpec, such as torchax_ckpt.shardings.fsdp(mesh), or a "
            f"torchax.mesh_util.Mesh, found {type_name(shardings)}"
        )
    return functools.partial(resolve_rule, shardings, None)


def require_module(value: Any, path: tuple[str, ...]) -> None:
    """Raises AttachError unless the value is a torch module."""
    if not issubclass(type(value), torch.nn.Module):
        raise _wrong_type(path, "a torch.nn.Module", value)


def require_callable(argument: str, value: Any) -> None:
    """Raises AttachError, which names the argument, unless its value is callable or None."""
    if value is not None and not callable(value):
        raise AttachError(f"{argument}: expected a callable, found {type_name(value)}")


def _wrong_type(path: tuple[str, ...], expected: str, found: Any) -> AttachError:
    where = names.join(path)
    text = f"{where}: expected {expected}, found {type_name(found)}{state_dict_hint(found)}"
    return AttachError(text, key_path=where)
