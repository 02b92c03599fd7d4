"""Owns plain CPU tensors: state dicts for programs that know nothing of torchax, and torch's files.

A file is written by ``torch.save``, whose format is a pickle. Only a dict of plain tensors goes
into it, which ``torch.load(weights_only=True)`` reads; nothing is ever unpickled here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils._mode_utils

from torchax_ckpt.errors import DirectoryError, StepNotFoundError, UnsupportedLeafError
from torchax_ckpt.formats.weights import Weights, weights_at
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored.stored_step import StoredLeaf, StoredStep


def load_torch_state_dict(
    directory: str | os.PathLike[str],
    step: int | None = None,
    *,
    at: str | None = None,
    options: CheckpointOptions | None = None,
) -> dict[str, torch.Tensor]:
    """Reads the weights of a step as plain CPU tensors, for ``model.load_state_dict``.

    Neither torchax nor an accelerator is needed or used; a program that trains on this host is not
    disturbed. Dtypes are as they were stored; tied weights share one tensor. A module's extra state
    is left out.

    Args:
      directory: of the run, or ``gs://bucket/prefix``.
      step: completed steps of the checkpoint; None for the newest.
      at: where the weights are, if not those of the one attached model: ``model/generator``, or
        ``state/params`` of functional state, whose keys are joined with ``.``.
      options: memory bounds (``max_host_bytes``).

    Returns:
      Name -> tensor.

    Raises:
      StepNotFoundError: there is no such step, or none at all.
      MismatchError: there are no weights there.
      CorruptCheckpointError: the step is damaged.
      DirectoryError: it cannot be read now.
      UnsupportedLeafError: torch lacks the dtype of one of them.
    """
    run = RunDirectory(directory, read_only=True)
    if step is not None:
        committed = run.find(step)
    elif steps := run.steps():
        committed = steps[-1]
    else:
        raise StepNotFoundError(f"{run.path}: there are no checkpoints", path=run.path)
    stored = StoredStep(committed)
    return read_state_dict(stored, weights_at(stored, at), options or CheckpointOptions())


def read_state_dict(
    stored: StoredStep, weights: Weights, options: CheckpointOptions
) -> dict[str, torch.Tensor]:
    """The weights as plain CPU tensors; tied ones are one tensor."""
    return named_weights(weights, read_tensors(stored, weights.leaves.values(), options))


def named_weights(weights: Weights, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by leaf, under torch's names; tied ones are one tensor."""
    found = {name: tensors[leaf.name] for name, leaf in weights.leaves.items()}
    return {**found, **{alias: found[name] for alias, name in weights.ties.items()}}


def read_tensors(
    stored: StoredStep,
    leaves: Iterable[StoredLeaf],
    options: CheckpointOptions,
    allocate: Callable[[tuple[int, ...], np.dtype[Any]], np.ndarray] | None = None,
) -> dict[str, torch.Tensor]:
    """Leaves as plain CPU tensors, by their own names; arguments as of ``StoredStep.read``.

    Raises:
      UnsupportedLeafError: torch lacks the dtype of one of them.
    """
    dtypes = {leaf.name: _dtype(leaf.dtype, leaf.name) for leaf in leaves}
    arrays = stored.read(dtypes, options, allocate)
    with native_torch():
        return {name: _tensor(arrays.pop(name), dtype) for name, dtype in dtypes.items()}


def save_torch_file(state: Mapping[str, Any], out: Path) -> None:
    """Writes a state dict, or a dict of several, that ``torch.load(weights_only=True)`` reads.

    Raises:
      DirectoryError: the file is there already, or cannot be written.
    """
    if out.exists():
        raise DirectoryError(f"{out}: is there already; nothing was written", path=out)
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "xb") as file, native_torch():
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(out)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        # torch's zip writer reports a full disk as a RuntimeError.
        if isinstance(error, (OSError, RuntimeError)):
            raise DirectoryError(f"cannot write {out}: {error!s:.300}", path=out) from error
        raise


def _dtype(name: str, leaf: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or name == "int4":
        raise UnsupportedLeafError(f"{leaf}: torch has no dtype {name}", key_path=leaf)
    return found


def _tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the array's memory, by its bytes: numpy knows bfloat16 by another name."""
    octets = array.reshape(-1).view(np.uint8)
    return torch.from_numpy(octets).view(dtype).reshape(array.shape)


@contextlib.contextmanager
def native_torch() -> Iterator[None]:
    """In a program that has enabled torchax too, these are plain CPU tensors."""
    with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        yield
