"""Opens weight files that other programs wrote; imports them as the first step of a new run.

The weights are mapped into memory, so the host needs no memory for the whole model.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchax_ckpt.errors import DirectoryError, SelectionError, UnsupportedLeafError
from torchax_ckpt.formats.dcp import is_dcp, open_dcp
from torchax_ckpt.formats.optimizer_state import OPTIMIZER
from torchax_ckpt.formats.safetensors_io import is_safetensors, open_safetensors
from torchax_ckpt.formats.tensor_files import NARROWED, FileTensor, TensorFiles
from torchax_ckpt.formats.torch_files import is_torch_file, open_torch_file
from torchax_ckpt.formats.weights import MODEL
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import IMPORTED, Manifest, Node, installed_versions
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.snapshot.planner import with_host_leaves
from torchax_ckpt.state import node_checks
from torchax_ckpt.state.component import encoded
from torchax_ckpt.state.leaf import Spec
from torchax_ckpt.state.stored_entries import StoredOptimizer
from torchax_ckpt.storage.directory import step_folder
from torchax_ckpt.storage.directory.abandonment import SUMMARY_FIELD
from torchax_ckpt.storage.directory.assets import Assets
from torchax_ckpt.storage.directory.committed_step import (
    STATE,
    CommittedStep,
)
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.writing import array_writer, step_writer


@dataclasses.dataclass(frozen=True)
class ImportedOptimizer:
    """An optimizer of another program; a value of state or groups is a FileTensor or plain."""

    class_name: str
    state: Mapping[str, Mapping[str, Any]]  # parameter -> key -> value
    groups: Sequence[Mapping[str, Any]]


def is_known(path: Path) -> bool:
    """Returns whether the path is any file, or a directory with a DCP checkpoint or safetensors."""
    return is_dcp(path) or is_torch_file(path) or is_safetensors(path)


def open_files(path: Path, at: str | None = None) -> TensorFiles:
    """Opens weights of another program without reading a tensor; keys of nested dicts in ``at``."""
    if is_dcp(path):
        return open_dcp(path, at)
    if is_torch_file(path):
        return open_torch_file(path, at)
    if at is not None:
        raise SelectionError(
            f"{path}: was written neither by torch.save nor by torch's DCP. Only these two formats "
            f"have nested keys, to which at={at!r} could refer. Call again without at=."
        )
    return open_safetensors(path)


def import_weights(
    source: TensorFiles,
    directory: str | os.PathLike[str],
    *,
    step: int = 0,
    ties: Mapping[str, str],
    assets: Assets | None = None,
    optimizer: ImportedOptimizer | None = None,
) -> CommittedStep:
    """Writes weights as the first step of a directory; ``ties`` adds some, alias -> name."""
    options = CheckpointOptions()
    tied = {**source.ties, **ties}
    for alias, name in tied.items():
        if name not in source.tensors or alias in source.tensors:
            raise UnsupportedLeafError(
                f"{alias}: cannot be tied to {name}: expected files that contain {name} and do not "
                f"contain {alias}. Correct or leave out this tie"
            )
    arrays = {
        names.join((MODEL, name)): _as_on_devices(name, tensor.mapped())
        for name, tensor in source.tensors.items()
    }
    nodes = [Spec("torchax", a.dtype.name, a.shape).node(name) for name, a in arrays.items()]
    moments = {} if optimizer is None else {OPTIMIZER: _optimizer_node(optimizer, arrays)}
    plan, stored = with_host_leaves(Plan(), arrays, options.layout)
    document = {
        MODEL: {
            "dict": [[fqn, node] for fqn, node in zip(source.tensors, nodes, strict=True)],
            "ties": [[alias, name] for alias, name in tied.items()],
        },  # without extra state: attach then leaves that of the modules as it is
        **moments,
        IMPORTED: [path.name for path in source.paths],
    }
    began_nsecs = time.time_ns()
    run = RunDirectory(directory)
    _require_empty(run)
    with step_folder.claimed(run):
        _require_empty(run)  # again: before the claim, another program could still write a step
        with step_folder.writing(run, step) as folder:
            digests = array_writer.write_arrays(
                folder.path / STATE,
                stored,
                {},
                stacks=plan.stacks,
                codec=array_writer.codec_of(options.compression),
                max_bytes=options.max_host_bytes,
            )
            seal = None if assets is None else assets.seal
            step_writer.complete(
                folder.path,
                stored,
                Manifest(document, plan, installed_versions(), digests, assets=seal),
                {"metrics": {}, SUMMARY_FIELD: []},
                began_nsecs=began_nsecs,
                at_nsecs=time.time_ns(),
                assets=assets,
            )
            return folder.commit()


def _optimizer_node(optimizer: ImportedOptimizer, arrays: dict[str, Any]) -> Node:
    """Returns the node of an optimizer, and adds its tensors to ``arrays``, by leaf name."""

    def node_of(value: Any, *key_path: object) -> Node:
        if not isinstance(value, FileTensor):
            captured = encoded(value, key_path)
            arrays.update(captured.by_name())
            return captured.form.node
        name, array = names.join(key_path), value.mapped()
        # Counters of steps and learning rates, which torchax too keeps on the CPU.
        kind = "torchax" if array.ndim else "torch"
        arrays[name] = _as_on_devices(name, array) if array.ndim else array
        return Spec(kind, arrays[name].dtype.name, array.shape).node(name)

    state, groups = [], []
    for parameter, entries in optimizer.state.items():
        nodes = [[key, node_of(v, OPTIMIZER, parameter, key)] for key, v in entries.items()]
        state.append([names.escape(parameter), {"dict": nodes}])
    for index, group in enumerate(optimizer.groups):
        where = (OPTIMIZER, "param_groups", index)
        params = node_checks.texts(group.get("params"), names.join((*where, "params")))
        escaped = {**group, "params": [names.escape(name) for name in params]}
        groups.append({"dict": [[key, node_of(v, *where, key)] for key, v in escaped.items()]})
    pairs = [["state", {"dict": state}], ["param_groups", groups]]
    node = {"dict": pairs, "class": optimizer.class_name}
    StoredOptimizer.of_node(node, OPTIMIZER)  # refuses what no attach could restore
    return node


def _require_empty(run: RunDirectory) -> None:
    if steps := run.steps():
        raise DirectoryError(
            f"{run.path}: expected a directory without checkpoints, found step {steps[-1].step}. "
            "Give another directory.",
            path=run.path,
        )


def _as_on_devices(name: str, array: np.ndarray) -> np.ndarray:
    """Converts an array to the dtype that ``.to("jax")`` would give it, if no value changes."""
    if array.dtype.name == "float64":
        raise UnsupportedLeafError(
            f"{name}: the tensor is float64, which JAX would convert to float32. Convert it to "
            "float32 in the files before the import"
        )
    if array.dtype.name not in NARROWED:
        return array
    narrow = array.astype(NARROWED[array.dtype.name])
    if not np.array_equal(narrow, array):
        raise UnsupportedLeafError(
            f"{name}: the tensor is {array.dtype.name}, which JAX converts to {narrow.dtype.name}, "
            f"and has values outside the range of {narrow.dtype.name}. Leave this "
            "tensor out of the files"
        )
    return narrow
