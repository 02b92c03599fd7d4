"""Owns making the first step of a run from files of other programs: weights to start from.

The tensors are mapped, not read, so that a model of any size is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from torchax_ckpt.errors import DirectoryError, UnsupportedLeafError
from torchax_ckpt.formats.tensor_files import TensorFiles
from torchax_ckpt.formats.weights import MODEL
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import IMPORTED, Manifest, Node, installed_versions
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.snapshot.stacking import Planner, execute
from torchax_ckpt.storage.arrays import write_step
from torchax_ckpt.storage.directory.abandonment import SUMMARY_FIELD
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory

# What .to("jax") makes of 64-bit integers, unless JAX is told to keep them.
_NARROW = {"int64": "int32", "uint64": "uint32"}


def import_weights(
    source: TensorFiles,
    directory: str,
    *,
    step: int = 0,
    ties: Mapping[str, str] | None = None,
    options: CheckpointOptions | None = None,
) -> CommittedStep:
    """Writes the weights as a step from which ``attach`` goes on, in a directory that has none.

    64-bit integers are stored as 32-bit ones where their values fit, as they are on devices.

    Args:
      source: the weights.
      directory: of the new run.
      step: the number of the step.
      ties: another name of a tied weight -> its name in the files; joins what the files say.
      options: memory bounds, compression, layout.

    Raises:
      DirectoryError: the directory has steps already, or cannot be written.
      LeaseError: another program writes to it.
      UnsupportedLeafError: a tie to what is not there, or a dtype that devices narrow.
    """
    options = options or CheckpointOptions()
    tied = {**source.ties, **(ties or {})}
    for alias, name in tied.items():
        if name not in source.tensors or alias in source.tensors:
            raise UnsupportedLeafError(
                f"{alias}: cannot be tied to {name}: expected files that hold {name} and not "
                f"{alias}"
            )
    arrays = {
        names.join((MODEL, name)): _as_on_devices(name, tensor.mapped())
        for name, tensor in source.tensors.items()
    }
    plan = Planner(options.layout)(list(arrays), list(arrays.values()))
    stored = execute(plan, arrays, copy=False)
    document = {
        MODEL: {
            "dict": [[name, _node(names.join((MODEL, name)), arrays)] for name in source.tensors],
            "ties": [[alias, name] for alias, name in tied.items()],
            "extra_state": [],
        },
        IMPORTED: [path.name for path in source.paths],
    }
    return _write(RunDirectory(directory), step, document, plan, stored, options)


def _write(
    run: RunDirectory,
    step: int,
    document: Mapping[str, Node],
    plan: Plan,
    stored: Mapping[str, Any],
    options: CheckpointOptions,
) -> CommittedStep:
    _require_empty(run)
    try:
        run.claim()
        _require_empty(run)  # now that nobody else writes to it
        run.recover()
        path = run.path_for(step)
        write_step.write_step(
            path,
            stored,
            lambda taken: Manifest(document, plan, installed_versions(), taken).to_json(),
            {"metrics": {}, SUMMARY_FIELD: []},
            options,
            bool(options.compression),
            stacks=plan.stacks,
            before_commit=run.fence,
        )
        return run.commit(step, path)
    finally:
        run.release()


def _require_empty(run: RunDirectory) -> None:
    if there := run.steps():
        raise DirectoryError(
            f"{run.path}: expected a directory without checkpoints, found step {there[-1].step}. "
            "Import into a directory of its own.",
            path=run.path,
        )


def _node(name: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    array = arrays[name]
    return {
        "array": name,
        "kind": "torchax",
        "dtype": array.dtype.name,
        "shape": list(array.shape),
    }


def _as_on_devices(name: str, array: np.ndarray) -> np.ndarray:
    """The array as ``.to("jax")`` would have it; raises where that would change a value."""
    if array.dtype.name == "float64":
        raise UnsupportedLeafError(
            f"{name}: is float64, which devices narrow: convert it to float32 first"
        )
    if array.dtype.name not in _NARROW:
        return array
    narrow = array.astype(_NARROW[array.dtype.name])
    if not np.array_equal(narrow, array):
        raise UnsupportedLeafError(
            f"{name}: is {array.dtype.name} with values beyond {narrow.dtype.name}, which devices "
            "have in its place"
        )
    return narrow


def parsed_ties(texts: Iterable[str]) -> dict[str, str]:
    """``ALIAS=NAME`` as a mapping.

    Raises:
      ValueError: one is of another form.
    """
    ties = {}
    for text in texts:
        alias, separator, name = text.partition("=")
        if not (separator and alias and name):
            raise ValueError(f"expected ALIAS=NAME, found {text!r}")
        ties[alias] = name
    return ties
