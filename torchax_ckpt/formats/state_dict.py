"""Reads steps as state dicts of plain CPU tensors, and writes them to files of ``torch.save``.

``torch.save`` writes pickles. This module writes only dicts of plain tensors and numbers, which
``torch.load(weights_only=True)`` reads.
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
from etils import epath

from torchax_ckpt.errors import DirectoryError, StepNotFoundError, UnsupportedLeafError
from torchax_ckpt.formats.weights import Weights, weights_at
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.runtime.tracebacks import brief
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import fsync, permissions
from torchax_ckpt.stored.stored_step import StoredLeaf, StoredStep


@brief
def load_torch_state_dict(
    directory: str | os.PathLike[str],
    step: int | None = None,
    *,
    at: str | None = None,
    options: CheckpointOptions | None = None,
) -> dict[str, torch.Tensor]:
    """Reads the weights of a step as plain CPU tensors, for ``model.load_state_dict``.

    The function uses neither torchax nor an accelerator, so it does not disturb a program that
    trains on this host. Tensors have their stored dtypes, and tied weights share one tensor. The
    result does not contain the extra state of modules (``get_extra_state``).

    Args:
      directory: the run's directory, or ``gs://bucket/prefix``.
      step: completed optimizer steps of the checkpoint; None for the newest checkpoint.
      at: key path of the weights: ``model/generator`` if several models were attached, or
        ``state/params`` for functional state, whose keys are joined with ``.``. None for the one
        attached model.
      options: memory bounds (``max_host_bytes``).

    Returns:
      A dict from torch's name to the tensor.

    Raises:
      StepNotFoundError: the directory has no such step, or no step at all.
      MismatchError: there are no weights at the key path ``at``.
      CorruptCheckpointError: the step is damaged.
      DirectoryError: the step cannot be read at the moment.
      UnsupportedLeafError: torch lacks the dtype of a weight.
    """
    run = RunDirectory(directory, read_only=True)
    if step is not None:
        committed = run.find(step)
    elif steps := run.steps():
        committed = steps[-1]
    else:
        raise StepNotFoundError(f"{run.path}: there are no checkpoints", path=run.path)
    stored = StoredStep(committed, options)
    return read_state_dict(stored, weights_at(stored, at))


def read_state_dict(stored: StoredStep, weights: Weights) -> dict[str, torch.Tensor]:
    """Reads weights; returns a dict from the name of each weight in torch to a plain CPU tensor.

    Tied weights share one tensor.
    """
    return named_weights(weights, read_tensors(stored, weights.leaves.values()))


def named_weights(weights: Weights, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns a dict from torch's name of each weight to its tensor; tied weights share one tensor.

    Args:
      weights: the names, leaves and ties.
      tensors: name of a leaf -> its tensor.
    """
    found = {name: tensors[leaf.name] for name, leaf in weights.leaves.items()}
    return {**found, **{alias: found[name] for alias, name in weights.ties.items()}}


def read_tensors(
    stored: StoredStep,
    leaves: Iterable[StoredLeaf],
    allocate: Callable[[tuple[int, ...], np.dtype[Any]], np.ndarray] | None = None,
) -> dict[str, torch.Tensor]:
    """Reads leaves; returns a dict from leaf name to plain CPU tensor.

    ``StoredStep.read`` explains the arguments.

    Raises:
      UnsupportedLeafError: torch lacks the dtype of a leaf.
    """
    dtypes = {leaf.name: _dtype(leaf.dtype, leaf.name) for leaf in leaves}
    arrays = stored.read(dtypes, allocate)
    with native_torch():
        return {name: _tensor(arrays.pop(name), dtype) for name, dtype in dtypes.items()}


def save_torch_file(state: Mapping[str, Any], out: Path) -> None:
    """Writes a state dict, or a dict of state dicts, for ``torch.load(weights_only=True)``.

    Raises:
      DirectoryError: the file exists already, or cannot be written.
    """
    if out.exists():
        raise DirectoryError(f"{out}: exists already; nothing was written", path=out)
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    try:
        permissions.make_folder(epath.Path(out.parent))
        with open(partial, "xb") as file, native_torch():
            torch.save(dict(state), file)
        fsync.swap_in(partial, out)
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
    """Returns a torch tensor that shares the memory of a numpy array.

    The conversion views the array as bytes, because torch does not know the dtypes of ml_dtypes,
    such as bfloat16.
    """
    octets = array.reshape(-1).view(np.uint8)
    return torch.from_numpy(octets).view(dtype).reshape(array.shape)


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """Returns a numpy array that shares the memory of a plain CPU tensor."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    if dtype.isbuiltin == 1:  # numpy's own; those of ml_dtypes have 2
        return np.asarray(tensor.numpy())
    integers = torch.int16 if dtype.itemsize == 2 else torch.uint8
    return np.asarray(tensor.view(integers).numpy()).view(dtype)


@contextlib.contextmanager
def native_torch() -> Iterator[None]:
    """Makes torch create plain CPU tensors in the ``with`` block, even if torchax is enabled."""
    with torch.utils._mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        yield
