"""Restores a step into the objects of a program in plain PyTorch, in place."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from torchax_ckpt.errors import AttachError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Node, array_nodes
from torchax_ckpt.layout.nodes import decode
from torchax_ckpt.plain_torch import native_torch
from torchax_ckpt.restoring.fallback import newest_readable
from torchax_ckpt.runtime import user_messages
from torchax_ckpt.runtime.undoing import undone_on_failure
from torchax_ckpt.runtime.user_messages import brief
from torchax_ckpt.state import generators, node_checks, per_process_state
from torchax_ckpt.state.findings import Findings, RestoreReport, refused, type_name
from torchax_ckpt.state.stored_entries import EXTRA_STATE, SCHEDULER, StoredOptimizer, takes
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored.stored_step import StoredStep, about
from torchax_ckpt.torch.state_trees import WIDER, compare, module_state, revived, stand_in


@brief
def restore(
    run: str | os.PathLike[str],
    model: Any,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    dataloader: Any = None,
    *,
    step: int | None = None,
    strict: bool = True,
) -> RestoreReport:
    """Restores a step of a run into modules, optimizers and other objects of plain PyTorch.

    For a program of one process, on any device of torch; others load with ``StorageReader``. All
    objects are changed in place, or none. What is left out of the call is neither compared nor
    read. The states of torch's (CPU), numpy's and Python's random generators are restored too, of
    several processes those of process 0; torchax's random key has no counterpart, and is in the
    report's ``left_out``.

    Args:
      run: the directory of the run or of one of its steps, or ``gs://bucket/prefix``.
      model: an ``nn.Module``, or a mapping from the names that ``attach`` was given to modules.
      optimizer: a ``torch.optim.Optimizer`` over parameters of ``model``; state that it lacks is
        made on the devices of the parameters. Or a mapping, as for ``model``.
      lr_scheduler: an object with ``load_state_dict``, a list or a mapping of such objects.
      dataloader: an object with the methods that ``attach`` knows, or a mapping.
      step: completed optimizer steps of the checkpoint; None for the newest that is readable. Each
        newer one that is damaged is a UserWarning.
      strict: raise on any difference; otherwise restore what matches, and report the rest.

    Returns:
      The report, as of ``TorchaxCheckpointer.restore``.

    Raises:
      MismatchError: lists all names, shapes and dtypes that differ; a stored 32-bit number may
        become one of 64 bits, because ``.to("jax")`` narrowed it. Or an object refused its state.
      AttachError: an object cannot be restored in place, such as a DTensor.
      StepNotFoundError, CorruptCheckpointError, DirectoryError, OutOfMemoryError: as ``attach``.
      ForeignCheckpointError: Orbax alone wrote the step; ``StorageReader`` reads it.
      UnsupportedLeafError: torch lacks the dtype of a leaf.
    """
    if isinstance(lr_scheduler, Sequence):
        lr_scheduler = {str(i): scheduler for i, scheduler in enumerate(lr_scheduler)}
    given = {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": lr_scheduler,
        "dataloader": dataloader,
    }
    objects = {name: value for name, value in given.items() if value is not None}
    for name, value in objects.items():
        if hint := per_process_state.state_dict_hint(value):
            raise AttachError(f"{name}: expected an object, found {type_name(value)}{hint}")
    directory = RunDirectory(run, read_only=True, reads_step=True)

    def attempt(committed: CommittedStep) -> RestoreReport:
        # Tensors that are made in inference mode could not be trained.
        with about(committed), native_torch(), torch.inference_mode(False):
            return _restored(StoredStep(committed), objects, strict=strict)

    report, skipped = newest_readable(directory.candidates(step), attempt)
    return dataclasses.replace(report, skipped_steps=skipped)


def _restored(stored: StoredStep, objects: Mapping[str, Any], *, strict: bool) -> RestoreReport:
    step, path = stored.committed.step, str(stored.committed.path)
    document = per_process_state.document_of(
        stored.manifest.document, 0, 1, f"step {step}", taken=objects
    )
    plan, findings = _Plan(), Findings(state=document.get("state"))
    for component, value in objects.items():
        live = dict(value) if isinstance(value, Mapping) else {"": value}
        node = document.get(component, {"dict": [], "group": True})
        members = node_checks.members(node, component)
        for name in dict.fromkeys((*live, *members)):
            where = names.join((component, name) if name else (component,))
            if name not in members:
                findings.missing.append(where)
            elif name not in live:
                findings.unexpected.append(where)
            else:
                plan.add(component, name, live[name], members[name], where, findings)
    if strict and findings:
        raise findings.error(step, path, "torch.restore")
    left_out = [name for name in document if name not in (*objects, "rng")]
    if (node := document.get("rng")) is not None:
        plan.add_generators(node)
        left_out.append("rng/torchax")
    plan.carry_out(stored.read(plan.reads))
    return findings.report(step, left_out, is_verified=stored.is_whole(plan.reads, 1))


class _Plan:
    """The leaves that a restore reads, then the changes that it makes, all or none."""

    def __init__(self) -> None:
        self.reads: dict[str, None] = {}
        self._names: dict[int, list[str]] = {}  # id of a live parameter -> its names
        self._arrays: Mapping[str, np.ndarray] = {}
        # Each gives an object its state, which may fail, and adds what undoes that.
        self._calls: list[Callable[[list[Callable[[], object]]], None]] = []
        self._fills: list[Callable[[], object]] = []  # cannot fail
        # Each makes new values on their devices, and returns a change that cannot fail.
        self._stages: list[Callable[[], Callable[[], object]]] = []

    def add(
        self, component: str, name: str, value: Any, node: Node, where: str, findings: Findings
    ) -> None:
        """Compares an object with its node, and plans its change."""
        kind = {"model": torch.nn.Module, "optimizer": torch.optim.Optimizer}.get(component)
        if kind is not None and not isinstance(value, kind):
            raise AttachError(f"{where}: expected a {kind.__name__}, found {type_name(value)}")
        if component == "model":
            self._add_module(value, name, node, where, findings)
        elif component == "optimizer":
            self._add_optimizer(value, node, where, findings)
        elif (methods := per_process_state.methods_of(value)) is None:
            raise AttachError(f"{where}: expected a state_dict method, found {type_name(value)}")
        else:
            get, load = (getattr(value, name) for name in methods)
            if component != SCHEDULER or takes(value, get(), node, where, findings):
                self._add_call(where, value, get, load, node)

    def add_generators(self, node: Node) -> None:
        """Plans to set the generators last, because objects may draw while they load."""
        node = {"dict": [[k, v] for k, v in node_checks.fields(node, "rng").items()]}
        value_of = self._reader(node)

        def stage() -> Callable[[], None]:
            state = value_of()
            generators.check(state)
            return functools.partial(generators.set_states, state)

        self._stages.append(stage)

    def carry_out(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Makes all changes, or none; ``arrays`` has what ``reads`` names."""
        self._arrays = arrays
        changes = [stage() for stage in self._stages]
        with undone_on_failure() as undos:
            for call in self._calls:
                call(undos)
        for change in (*self._fills, *changes):
            change()

    def _reader(
        self, node: Node, placed: Callable[[Any, Node], Any] = lambda value, leaf: value
    ) -> Callable[[], Any]:
        """Adds the leaves of a node to the reads; returns what then gives the node's value."""
        self.reads |= dict.fromkeys(leaf["array"] for leaf in array_nodes(node))
        return lambda: decode(
            node, lambda leaf: placed(revived(leaf, self._arrays[leaf["array"]]), leaf)
        )

    def _add_call(
        self, where: str, owner: Any, get: Callable[[], Any], load: Callable[[Any], Any], node: Node
    ) -> None:
        """Plans a call that gives an object its state; it may fail: it runs the user's code."""
        value_of = self._reader(node)

        def call(undos: list[Callable[[], object]]) -> None:
            attributes, before = dict(getattr(owner, "__dict__", {})), copy.deepcopy(get())

            def undo() -> None:
                if attributes:
                    owner.__dict__.clear()
                    owner.__dict__.update(attributes)
                load(before)

            undos.append(undo)
            state = value_of()
            with refused(where):
                load(state)
                get()  # torchdata's loader draws when it first uses a state: not later
            if (warning := per_process_state.end_of_epoch(where, owner, state)) is not None:
                self._fills.append(lambda: user_messages.warn(warning))

        self._calls.append(call)

    def _add_module(
        self, module: torch.nn.Module, member: str, node: Node, where: str, findings: Findings
    ) -> None:
        stored = module_state(node, where)
        every = module.state_dict(keep_vars=True)
        raw = {names.without_compile(name): name for name in every}
        live = {fqn: every[name] for fqn, name in raw.items()}
        ties: dict[int, int] = {}  # id of a live tensor -> of its node, and the reverse
        extra: dict[str, Node] = {}
        for fqn, tensor in live.items():
            name = f"{where}/{names.escape(fqn)}"
            if not fqn.endswith(EXTRA_STATE):
                _require_plain(name, tensor)
                known = names.join((member, fqn) if member else (fqn,))
                self._names.setdefault(id(tensor), []).append(known)
            if fqn not in stored:
                findings.missing.append(name)
            elif fqn.endswith(EXTRA_STATE):
                extra[fqn] = stored[fqn]
            else:
                a, b = id(tensor), id(stored[fqn])
                if (ties.setdefault(a, b), ties.setdefault(b, a)) != (b, a):
                    findings.mismatch(name, "the same ties", "others")
                elif compare(name, tensor, stand_in(stored[fqn]), findings):
                    fill = functools.partial(_fill, tensor.detach(), self._reader(stored[fqn]))
                    self._fills.append(fill)
        findings.unexpected += [f"{where}/{names.escape(n)}" for n in stored if n not in live]
        if extra:

            def load(state: Mapping[str, Any]) -> None:
                of_raw = {raw[fqn]: value for fqn, value in state.items()}
                result = module.load_state_dict(of_raw, strict=False)
                if unexpected := getattr(result, "unexpected_keys", None):
                    raise KeyError(f"load_state_dict does not know {', '.join(unexpected)}")

            def get() -> dict[str, Any]:
                state = module.state_dict()
                return {fqn: state[raw[fqn]] for fqn in extra}

            node = {"dict": [[fqn, child] for fqn, child in extra.items()]}
            self._add_call(f"{where}/{EXTRA_STATE}", None, get, load, node)

    def _add_optimizer(
        self, optimizer: torch.optim.Optimizer, node: Node, where: str, findings: Findings
    ) -> None:
        stored = StoredOptimizer.of_node(node, where)
        if (expected := type(optimizer).__qualname__) != node.get("class"):
            findings.mismatch(where, expected, node.get("class"))
            return
        used: set[str] = set()
        for index, group in enumerate(optimizer.param_groups):
            on_device = bool(group.get("fused") or group.get("capturable"))
            members = []
            for parameter in group["params"]:
                known = self._names.get(id(parameter))
                if known is None:
                    raise AttachError(f"{where}: has a parameter that is not one of the model's")
                name = next((n for n in known if n in stored.group_of), None)
                if name is None:
                    findings.missing.append(f"{where}/{known[0]}")
                    continue
                members.append(name)
                state = node_checks.keyed(stored.state.get(name, {"dict": []}), where)
                fits = [f"model/{n}" not in findings.mismatched for n in known] + [
                    compare(f"{where}/{name}/{key}", value, stand_in(state[key]), findings)
                    for key, value in optimizer.state.get(parameter, {}).items()
                    if isinstance(value, torch.Tensor) and key in state
                ]
                if all(fits):
                    put = functools.partial(optimizer.state.__setitem__, parameter)
                    self._add_entries(put, state, parameter, on_device)
            used.update(members)
            common, differing = stored.hyperparameters(members)
            for key, texts in differing.items():
                findings.mismatch(f"{where}/param_groups/{index}/{key}", *texts)
            if common:
                self._add_entries(group.update, common, group["params"][0], on_device)
        findings.unexpected += [f"{where}/{name}" for name in stored.group_of if name not in used]
        every = [p for group in optimizer.param_groups for p in group["params"]]
        put = functools.partial(_put_other_state, optimizer)
        self._add_entries(put, stored.other_state, every[0] if every else None, False)

    def _add_entries(
        self,
        put: Callable[[dict[Any, Any]], object],
        entries: Mapping[Any, Node],
        parameter: torch.Tensor | None,
        on_device: bool,
    ) -> None:
        """Plans to ``put`` an optimizer's values, on the devices where torch would make them.

        torch keeps counters of steps on the CPU, as torchax does, unless ``on_device``. Without a
        parameter, all values stay on the CPU.
        """

        def placed(value: Any, node: Node) -> Any:
            if parameter is None or not isinstance(value, torch.Tensor):
                return value
            is_wider = value.shape == parameter.shape and WIDER.get(value.dtype) == parameter.dtype
            is_here = not on_device and node["kind"] == "torch"
            return value.to(
                "cpu" if is_here else parameter.device, parameter.dtype if is_wider else value.dtype
            )

        readers = {key: self._reader(node, placed) for key, node in entries.items()}
        self._stages.append(
            lambda: functools.partial(put, {key: value_of() for key, value_of in readers.items()})
        )


def _put_other_state(optimizer: torch.optim.Optimizer, state: Mapping[Any, Any]) -> None:
    for key in [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        del optimizer.state[key]
    optimizer.state.update(state)


def _fill(target: torch.Tensor, value_of: Callable[[], Any]) -> None:
    with torch.inference_mode(target.is_inference()):  # which such a tensor's changes need
        target.copy_(value_of())


def _require_plain(name: str, tensor: torch.Tensor) -> None:
    """Raises AttachError for a tensor that cannot be filled in place; not for other overlaps."""
    problem = ""
    if is_lazy(tensor):
        problem = "uninitialized: run the model once before"
    elif hasattr(tensor, "device_mesh"):
        problem = "a DTensor: load it with torchax_ckpt.torch.StorageReader"
    elif tensor.device.type == "jax":
        problem = "on torchax: attach the model to a TorchaxCheckpointer"
    elif tensor.is_meta:
        problem = "on the meta device: call model.to_empty(device=...) before"
    elif tensor.layout != torch.strided or 0 in (
        stride for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1
    ):
        problem = "expanded or sparse: give the model a tensor that has memory for every element"
    if problem:
        raise AttachError(f"{name}: is {problem}", key_path=name)
