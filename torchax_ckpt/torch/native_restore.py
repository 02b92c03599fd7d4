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
from torchax_ckpt.runtime.user_messages import brief
from torchax_ckpt.state import generators, node_checks, per_process_state
from torchax_ckpt.state.findings import Findings, RestoreReport, type_name
from torchax_ckpt.state.plans import matching
from torchax_ckpt.state.plans.restoration import Change, Restoration, Values
from torchax_ckpt.state.stored_entries import EXTRA_STATE, SCHEDULER, takes
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored import named_steps
from torchax_ckpt.stored.stored_step import StoredStep, about
from torchax_ckpt.torch.state_trees import WIDER, compare, revived, stand_in

# What goes where torch makes it, in host memory.
_NOBODY = matching.Owner(None, {}, is_state=False)


@brief
def restore(
    run: str | os.PathLike[str],
    model: Any,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    dataloader: Any = None,
    *,
    step: int | str | None = None,
    strict: bool = True,
) -> RestoreReport:
    """Restores a step of a run into modules, optimizers and other objects of plain PyTorch.

    For a program of one process, on any device of torch; others load with ``StorageReader``. All
    objects are changed in place, or none. What is left out of the call is neither compared nor
    read. The states of torch's (CPU), numpy's and Python's random generators are restored too, of
    several processes those of process 0; torchax's random key has no counterpart, and is in the
    report's ``left_out``. A module gets its extra state by ``set_extra_state``, so its hooks of
    ``load_state_dict`` do not run.

    Args:
      run: the directory of the run or of one of its steps, also ``gs://...`` or ``s3://...``.
      model: an ``nn.Module``, or a mapping from the names that ``attach`` was given to modules.
      optimizer: a ``torch.optim.Optimizer`` over parameters of ``model``; state that it lacks is
        made on the devices of the parameters. Or a mapping, as for ``model``.
      lr_scheduler: an object with ``load_state_dict``, a list or a mapping of such objects.
      dataloader: an object with the methods that ``attach`` knows, or a mapping.
      step: completed optimizer steps of the checkpoint, or a name, as for ``torchax_ckpt.load``;
        None for the newest that is readable. Each newer one that is damaged is a UserWarning.
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

    report, skipped = newest_readable(lambda: named_steps.candidates(directory, step), attempt)
    return dataclasses.replace(report, skipped_steps=skipped)


def _restored(stored: StoredStep, objects: Mapping[str, Any], *, strict: bool) -> RestoreReport:
    step, path = stored.committed.step, str(stored.committed.path)
    document = per_process_state.document_of(
        stored.manifest.document, 0, 1, f"step {step}", taken=objects
    )
    for component, node in document.items():
        node_checks.check_values(node, component)
    findings = Findings(state=document.get("state"))
    plan = Restoration(findings=findings)
    matched = _Matched(plan)
    for component, value in objects.items():
        live = dict(value) if isinstance(value, Mapping) else {"": value}
        node = document.get(component, {"dict": [], "group": True})
        for name, one, child in matching.match_members(live, node, (component,), findings):
            matched.add(one, child, (component, name) if name else (component,))
    if strict and findings:
        raise findings.error(step, path, "torch.restore")
    left_out = [name for name in document if name not in (*objects, "rng")]
    if (node := document.get("rng")) is not None:
        matched.add_generators(node)
        left_out.append("rng/torchax")
    arrays = stored.read(plan.reads)
    plan.apply({name: _placed(arrays[name], places) for name, places in plan.reads.items()})
    return findings.report(step, left_out, is_verified=stored.is_whole(plan.reads, 1))


class _Matched:
    """Adds objects of a plain program to the plan of a restore; see ``matching.Backend``."""

    def __init__(self, plan: Restoration) -> None:
        self._plan = plan
        self._names: dict[int, list[str]] = {}  # id of a live parameter -> its names

    def add(self, value: Any, node: Node, key_path: tuple[str, ...]) -> None:
        """Compares an object with its node, and plans its change."""
        component, where = key_path[0], names.join(key_path)
        kind = {"model": torch.nn.Module, "optimizer": torch.optim.Optimizer}.get(component)
        if kind is not None and not isinstance(value, kind):
            raise AttachError(f"{where}: expected a {kind.__name__}, found {type_name(value)}")
        if component == "model":
            self._add_module(value, node, key_path)
        elif component == "optimizer":
            parameter_names = functools.partial(self._parameter_names, value, where)
            matching.match_optimizer(value, node, where, parameter_names, self._plan, self)
        elif (methods := per_process_state.methods_of(value)) is None:
            raise AttachError(f"{where}: expected a state_dict method, found {type_name(value)}")
        else:
            get, load = (getattr(value, name) for name in methods)
            if component != SCHEDULER or takes(value, get(), node, where, self._plan.findings):
                self._add_call(where, value, get, load, node)

    def _parameter_names(
        self, optimizer: torch.optim.Optimizer, where: str
    ) -> Mapping[int, Sequence[str]]:
        keys = [id(p) for group in optimizer.param_groups for p in group["params"]]
        if any(key not in self._names for key in keys):
            raise AttachError(f"{where}: has a parameter that is not one of the model's")
        return {key: self._names[key] for key in keys}

    def add_generators(self, node: Node) -> None:
        """Plans to set the generators last, because objects may draw while they load."""
        node = {"dict": [[k, v] for k, v in node_checks.fields(node, "rng").items()]}
        for leaf in array_nodes(node):
            self.add_read(leaf)
        check, set_states = generators.check, generators.set_states
        self._plan.calls.append(Change(lambda values: check(_value_of(node, values))))
        self._plan.changes.append(Change(lambda values: set_states(_value_of(node, values))))

    def _add_call(
        self, where: str, owner: Any, get: Callable[[], Any], load: Callable[[Any], Any], node: Node
    ) -> None:
        """Plans a call that gives an object its state; it may fail: it runs the user's code."""
        for leaf in array_nodes(node):
            self.add_read(leaf)
        before: list[Any] = []  # what ``get`` returns, which may draw, so not before all fits

        def take(state: Any) -> None:
            before.append(copy.deepcopy(get()))
            load(state)
            get()  # torchdata's loader draws when it first uses a state: not later
            if (warning := per_process_state.end_of_epoch(where, owner, state)) is not None:
                self._plan.changes.append(Change(lambda values: user_messages.warn(warning)))

        def put_back() -> None:
            for state in before:
                load(state)

        self._plan.add_call(node, where, owner, take, put_back, _value_of)

    def _add_module(self, module: torch.nn.Module, node: Node, key_path: tuple[str, ...]) -> None:
        findings = self._plan.findings
        stored = matching.stored_module(node, names.join(key_path), findings)
        live: dict[int, tuple[list[str], torch.Tensor]] = {}
        for raw, tensor in module.state_dict(keep_vars=True).items():
            if not raw.endswith(EXTRA_STATE):
                fqn = names.without_compile(raw)
                _require_plain(names.join((*key_path, fqn)), tensor)
                live.setdefault(id(tensor), ([], tensor))[0].append(fqn)
        for identity, (fqns, _) in live.items():
            known = [names.join((*key_path[1:], fqn)) for fqn in fqns]
            self._names.setdefault(identity, []).extend(known)
        tensors = [(fqns[0], fqns, tensor) for fqns, tensor in live.values()]
        for tensor, leaf in matching.match_tensors(tensors, stored, key_path, findings, self.fits):
            self.add_read(leaf)
            fill = functools.partial(_fill, tensor.detach(), leaf["array"])
            self._plan.changes.append(Change(fill))
        modules = matching.extra_state_modules(module)
        for part, child, key in matching.match_extra_state(modules, stored, key_path, findings):
            where = names.join(key)
            self._add_call(where, part, part.get_extra_state, part.set_extra_state, child)

    def fits(self, live: torch.Tensor, node: Node, name: str) -> bool:
        return compare(name, live, stand_in(node), self._plan.findings)

    def add_read(self, leaf: Node, live: Any = None, owner: matching.Owner = _NOBODY) -> None:
        parameter, group = owner.parameter, owner.group

        def placed(array: np.ndarray) -> Any:
            value = revived(leaf, array)
            if parameter is None or not isinstance(value, torch.Tensor):
                return value
            # torch makes counters of steps on the CPU, as torchax does, unless they are to be on
            # the device of the parameter.
            on_device = leaf["kind"] != "torch" or group.get("fused") or group.get("capturable")
            is_wider = value.shape == parameter.shape and WIDER.get(value.dtype) == parameter.dtype
            device = parameter.device if on_device else "cpu"
            return value.to(device, parameter.dtype if is_wider else value.dtype)

        self._plan.reads.setdefault(leaf["array"], {})[owner] = placed

    def rebuilt(self, node: Node, live: Any, values: Values, owner: matching.Owner) -> Any:
        return _value_of(node, values, owner)

    def release(self, live: Any) -> None:
        pass  # a restore in plain PyTorch has no memory budget


def _placed(
    array: np.ndarray, places: Mapping[matching.Owner, Callable[[np.ndarray], Any]]
) -> dict[matching.Owner, Any]:
    """Returns a leaf's value for each of its owners, such as two groups with one learning rate.

    Each has memory of its own, because schedulers change rates in place.
    """
    own = [array, *(array.copy() for _ in range(len(places) - 1))]
    return {owner: place(a) for (owner, place), a in zip(places.items(), own, strict=True)}


def _value_of(node: Node, values: Values, owner: matching.Owner = _NOBODY) -> Any:
    return decode(node, lambda leaf: values[leaf["array"]][owner])


def _fill(target: torch.Tensor, leaf: str, values: Values) -> None:
    with torch.inference_mode(target.is_inference()):  # which such a tensor's changes need
        target.copy_(values[leaf][_NOBODY])


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
