"""Captures and restores optimizers: the state of each parameter, and the hyperparameters.

An optimizer's node is ``{"dict": [["state", {parameter: {key: value}}], ["param_groups",
[{"params": [parameter, ...], hyperparameter: value}]]], "class": name}``, with ``other_state`` for
keys that are not parameters. A restore matches parameters by name; their order and groups may
differ between the checkpoint and the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from operator import methodcaller
from typing import Any

import torch

from torchax_ckpt import torchax_backend
from torchax_ckpt.devices.sharding import Local, Placement, placement_of, replicated_like
from torchax_ckpt.errors import AttachError, UnsupportedLeafError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.runtime import user_messages
from torchax_ckpt.state.component import (
    Captured,
    Combined,
    Form,
    SameForm,
    add_read,
    captured_by,
    encoded,
    fits,
    require_alive,
)
from torchax_ckpt.state.findings import type_name
from torchax_ckpt.state.leaf import DEVICE_KINDS, Spec, Specs, arrays_of, describe
from torchax_ckpt.state.modules.module_tensors import same_objects
from torchax_ckpt.state.plans import matching
from torchax_ckpt.state.plans.restoration import Restoration, Values
from torchax_ckpt.state.pytree import Encoder, value_of
from torchax_ckpt.state.stored_entries import BY_POSITION, OTHER_STATE

ParameterNames = Callable[[], Mapping[int, tuple[tuple[str, ...], ...]]]
"""Returns id of every live parameter -> its present key paths below ``model``.

A tied parameter has several. The result is the same object until a name changes.
"""
ParameterPlacements = Callable[[], Mapping[int, Placement]]
"""Returns id of every live parameter -> its placement after its module is restored."""


class OptimizerComponent:
    """One attached optimizer; its moments get the placements of their parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        key_path: tuple[str, ...],
        parameter_names: ParameterNames,
        placements: ParameterPlacements,
    ) -> None:
        self.optimizer = optimizer
        self.key_path = key_path
        self._parameter_names = parameter_names
        self._placements = placements
        self._combined = Combined(self._node)
        self._members: list[list[int]] = []
        self._known: Mapping[int, tuple[tuple[str, ...], ...]] | None = None
        self._member_names: list[list[str]] = []
        self._stepped: list[Any] | None = None  # the keys of the optimizer's state
        self._order: list[int] = []
        self._signature: Any = None
        self._form = Form(None, ())
        self._with_same_form = SameForm()
        self._check()

    def _check(self) -> None:
        known = self._parameter_names()
        strangers = [
            (g, i)
            for g, group in enumerate(self.optimizer.param_groups)
            for i, p in enumerate(group["params"])
            if id(p) not in known
        ]
        if not strangers:
            return
        where = names.join(self.key_path)
        kind = type(self.optimizer).__name__
        if not known:
            raise AttachError(
                f"{where}: {kind} is attached without a module, so its parameters have no names. "
                "Attach the module that the optimizer trains, in the same call of attach.",
                key_path=where,
            )
        g, i = strangers[0]
        hint = "Attach the module that has them, or leave them out of the optimizer."
        if not torchax_backend.is_device_tensor(self.optimizer.param_groups[g]["params"][i]):
            hint = (
                "They are not torchax tensors: the optimizer was built before model.to('jax'), "
                "which replaced the model's parameters, so stepping it trains nothing. Build it "
                "after model.to('jax')."
            )
        one, many = (
            f"parameter of {kind} is no parameter",
            f"parameters of {kind} are not parameters",
        )
        raise AttachError(
            f"{where}: {user_messages.counted(len(strangers), one, many)} of the attached model, "
            f"the first at param_groups[{g}]['params'][{i}]. {hint}",
            key_path=where,
        )

    def _parameters(self) -> Iterator[tuple[torch.Tensor, tuple[tuple[str, ...], ...]]]:
        known = self._parameter_names()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, known[id(parameter)]

    # --- saving ---

    def capture(self) -> Captured:
        """Returns the optimizer's present state and hyperparameters."""
        groups = self.optimizer.param_groups
        members = [list(map(id, group["params"])) for group in groups]
        hyperparameters = [{k: v for k, v in g.items() if k not in BY_POSITION} for g in groups]
        known = self._parameter_names()
        if members != self._members or known is not self._known:
            self._check()
            self._members, self._known, self._stepped = members, known, None
            self._member_names = [[names.join(known[key][0]) for key in keys] for keys in members]
        state = self._capture_state()
        groups_ = encoded(hyperparameters, (*self.key_path, "param_groups"))
        parts = [self._with_same_form(groups_), state]
        is_whole = len(set(self._order)) == len(self.optimizer.state)  # all keys are parameters
        if not is_whole and (others := matching.other_state(self.optimizer)):
            parts.append(encoded(others, (*self.key_path, OTHER_STATE)))
        captured = self._combined(parts)
        require_alive(captured)
        return captured

    def _capture_state(self) -> Captured:
        """Captures the state; reuses the node if all values are tensors of unchanged specs."""
        state = self.optimizer.state
        # Compared by identity, since a lookup of each parameter would call its __hash__.
        stepped = list(state)
        if self._stepped is None or not same_objects(stepped, self._stepped):
            position = {id(key): i for i, key in enumerate(stepped)}
            self._order = [position[p] for group in self._members for p in group if p in position]
            self._stepped, self._signature = stepped, None
        entries = list(map(list(state.values()).__getitem__, self._order))
        # Loops in C: with ten thousand values, each loop in Python would take half a millisecond.
        if not all(issubclass(kind, Mapping) for kind in set(map(type, entries))):
            return self._encode_state()  # which refuses what is not a dict, by name
        keys = list(chain.from_iterable(entries))
        values = list(chain.from_iterable(map(methodcaller("values"), entries)))
        # A value that is not a tensor is part of the node, so the old form may be out of date.
        are_tensors = all(issubclass(kind, torch.Tensor) for kind in set(map(type, values)))
        if len(entries) < len(state) or not are_tensors:
            return self._encode_state()
        arrays = arrays_of(values, names.join(self.key_path))
        signature = [list(map(len, entries)), keys, Specs(values, arrays)]
        if signature == self._signature:
            self._signature = signature
            return Captured(self._form, arrays)
        captured = self._encode_state()
        self._signature, self._form = signature, captured.form
        return captured

    def _encode_state(self) -> Captured:
        known = self._parameter_names()
        stepped: list[tuple[tuple[str, ...], dict[Any, Any]]] = []
        encoder = Encoder()
        for parameter, value in self.optimizer.state.items():
            is_dict = isinstance(value, Mapping)
            if not isinstance(parameter, torch.Tensor) or (is_dict and not value):
                continue
            paths = known.get(id(parameter))
            if paths is None:
                name = names.join((*self.key_path, "state"))
                raise UnsupportedLeafError(
                    f"{name}: holds state under {str(parameter)[:60]!r}, which is not a parameter "
                    "of an attached module. Attach this parameter's module, or remove this state",
                    key_path=name,
                )
            if not is_dict:
                name = names.join((*self.key_path, *paths[0]))
                raise UnsupportedLeafError(
                    f"{name}: expected a dict as the optimizer's state of this parameter, found "
                    f"{type_name(value)}",
                    key_path=name,
                )
            if type(value) is not dict:
                encoder.note_change(value, "dict", (*self.key_path, *paths[0]))
            stepped.append((paths[0], dict(value)))
        # Order entries by parameter, because _capture_state collects its arrays in that order.
        order = {paths[0]: i for i, (_, paths) in enumerate(self._parameters())}
        stepped.sort(key=lambda item: order.get(item[0], len(order)))
        nodes = encoder.encode_all(((*self.key_path, *path), value) for path, value in stepped)
        node = {
            "dict": [
                [names.join(path), child] for (path, _), child in zip(stepped, nodes, strict=True)
            ]
        }
        return captured_by(encoder, node)

    def _node(self, nodes: list[Node]) -> Node:
        groups, state, *others = nodes
        described = [
            {"dict": [["params", members], *group["dict"]]}
            for members, group in zip(self._member_names, groups, strict=True)
        ]
        return {
            "dict": [
                ["state", state],
                ["param_groups", described],
                *([OTHER_STATE, node] for node in others),
            ],
            "class": type(self.optimizer).__qualname__,
        }

    # --- restoring ---

    @torchax_backend.native_torch()
    def prepare(self, node: Node, plan: Restoration) -> None:
        """Compares a stored optimizer with the live one; unselected parameters keep their state."""

        def parameter_names() -> dict[int, list[str]]:
            return {id(p): [*map(names.join, paths)] for p, paths in self._parameters()}

        where, backend = names.join(self.key_path), _Backend(plan, self._placements())
        matching.match_optimizer(self.optimizer, node, where, parameter_names, plan, backend)


class _Backend:
    """Puts stored values where the present ones of the optimizer are; see ``matching.Backend``."""

    def __init__(self, plan: Restoration, homes: Mapping[int, Placement]) -> None:
        self._plan, self._homes = plan, homes

    def fits(self, live: torch.Tensor, node: Node, name: str) -> bool:
        is_leaf = isinstance(node, dict) and "array" in node
        # Another value takes the place of a tensor as it was saved, in an optimizer of this class.
        return not is_leaf or fits(describe(live, name), node, name, self._plan.findings)

    def add_read(self, leaf: Node, live: Any, owner: matching.Owner) -> None:
        parameter = owner.parameter
        home = Local.DEFAULT_DEVICE if parameter is None else self._homes[id(parameter)]
        placement = replicated_like(home)
        if leaf["kind"] not in DEVICE_KINDS:
            placement = Local.HOST
        elif owner.is_state and parameter is not None and leaf["shape"] == list(parameter.shape):
            placement = home
        elif isinstance(live, torch.Tensor) and torchax_backend.is_device_tensor(live):
            placement = placement_of(torchax_backend.buffer(live))
        add_read(self._plan.reads, leaf, placement)

    def rebuilt(self, node: Node, live: Any, values: Values, owner: matching.Owner) -> Any:
        if isinstance(live, torch.Tensor) and isinstance(node, dict) and "array" in node:
            spec, value = Spec.of_node(node), values[node["array"]]
            if spec == describe(live, node["array"]):
                if spec.on_device:
                    torchax_backend.set_buffer(live, value)
                else:
                    torchax_backend.copy_into(live, value)
                return live
        return value_of(node, values)

    def release(self, live: Any) -> None:
        torchax_backend.release(live)


def unwrapped(value: Any) -> Any:
    """Returns the optimizer in a wrapper without state of its own; other objects as they are."""
    # AcceleratedOptimizer of accelerate and LightningOptimizer are such wrappers; Lookahead, which
    # adds state to that of another, is not.
    inner = getattr(value, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer) or inner is value:
        return value
    shared = all(getattr(value, n, None) is getattr(inner, n) for n in ("state", "param_groups"))
    return unwrapped(inner) if shared else value
