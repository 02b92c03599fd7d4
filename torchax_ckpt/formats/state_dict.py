"""Reads steps as state dicts of plain CPU tensors, and writes them to files of torch.

torch writes pickles: only dicts of plain tensors and numbers are written, which
``torch.load(weights_only=True)`` reads.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from etils import epath

from torchax_ckpt.errors import DirectoryError, UnsupportedLeafError
from torchax_ckpt.formats.tensor_files import writing
from torchax_ckpt.formats.weights import Weights, weights_at
from torchax_ckpt.options import CheckpointOptions, require_kind
from torchax_ckpt.plain_torch import native_torch, tensor_of
from torchax_ckpt.runtime.user_messages import brief
from torchax_ckpt.storage.arrays import read_arrays
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import permissions
from torchax_ckpt.stored import named_steps
from torchax_ckpt.stored.stored_step import StoredLeaf, StoredStep

_ALIGNMENT = 64

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], np.ndarray]


@brief
def load_torch_state_dict(
    directory: str | os.PathLike[str],
    step: int | str | None = None,
    *,
    at: str | None = None,
    options: CheckpointOptions | None = None,
) -> dict[str, torch.Tensor]:
    """Reads the weights of a step as plain CPU tensors, for ``model.load_state_dict``.

    The function uses neither torchax nor an accelerator, so it does not disturb a program that
    trains on this host. Tensors have their stored dtypes, and tied weights share one tensor. The
    result does not contain the extra state of modules (``get_extra_state``).

    Args:
      directory: that of the run or of one of its steps, also ``gs://...`` or ``s3://...``.
      step: completed optimizer steps of the checkpoint, or a name, as for ``torchax_ckpt.load``;
        None for the newest checkpoint.
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
    run = RunDirectory(directory, read_only=True, reads_step=True)
    options = require_kind("options", options, CheckpointOptions)
    stored = StoredStep(named_steps.candidates(run, step)[-1], options)
    weights = weights_at(stored, at)
    return named_weights(weights, read_tensors(stored, weights.leaves.values()))


def named_weights(weights: Weights, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns torch's name of each weight -> its tensor, given the tensors by leaf name."""
    found = {name: tensors[leaf.name] for name, leaf in weights.leaves.items()}
    return {**found, **{alias: found[name] for alias, name in weights.ties.items()}}


def read_tensors(
    stored: StoredStep, leaves: Iterable[StoredLeaf], allocate: Allocate | None = None
) -> dict[str, torch.Tensor]:
    """Reads leaves as plain CPU tensors, by leaf name; ``allocate`` as for ``StoredStep.read``."""
    dtypes = {leaf.name: torch_dtype(leaf.dtype, leaf.name) for leaf in leaves}
    arrays = stored.read(dtypes, allocate)
    return {name: tensor_of(arrays.pop(name), dtype) for name, dtype in dtypes.items()}


def torch_dtype(dtype: str, name: str) -> torch.dtype:
    """Returns torch's dtype for the leaf of this name; UnsupportedLeafError if there is none."""
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or dtype == "int4":
        raise UnsupportedLeafError(f"{name}: torch has no dtype {dtype}", key_path=name)
    return found


# --- files of torch ---


def save_torch_file(state: Mapping[str, Any], out: Path) -> None:
    """Writes nested dicts of tensors to a new file, for ``torch.load(weights_only=True)``."""
    with writing([out]) as (partial,), open(partial, "xb") as file, native_torch():
        torch.save(dict(state), file)


def save_dcp(state: Mapping[str, Any], out: Path) -> None:
    """Writes a state dict as torch's ``get_state_dict`` returns it, as DCP from one process."""
    import torch.distributed.checkpoint as dcp

    with writing([out]) as (partial,), warnings.catch_warnings(), native_torch():
        warnings.simplefilter("ignore")
        partial.mkdir()
        # Copying ahead speeds up reads from accelerators, but keeps several tensors in memory.
        writer = dcp.FileSystemWriter(partial, per_thread_copy_ahead=0)
        try:
            dcp.save(dict(state), storage_writer=writer, no_dist=True)
        except dcp.CheckpointException as error:
            raise OSError(str(error)) from error


@contextlib.contextmanager
def room_for(
    leaves: Sequence[StoredLeaf], folder: Path, options: CheckpointOptions
) -> Iterator[Allocate | None]:
    """Yields room in a file, whose pages can be evicted, for leaves beyond ``max_host_bytes``."""
    nbytes = sum(leaf.nbytes for leaf in leaves)
    if nbytes <= (options.max_host_bytes or read_arrays.STREAMED_BYTES):
        yield None
        return
    total = nbytes + _ALIGNMENT * len(leaves)
    try:
        permissions.make_folder(epath.Path(folder))
        with tempfile.TemporaryFile(dir=folder) as file:
            # Reserves the space, because a write to a mapped file on a full disk would kill the
            # process.
            os.posix_fallocate(file.fileno(), 0, total)
            memory = np.memmap(file, np.uint8, "r+", shape=(total,)).view(np.ndarray)
    except OSError as error:
        raise DirectoryError(
            f"{folder}: has no room for a temporary file of {total} bytes: {error}. Free disk "
            "space, or raise max_host_bytes to the size of all leaves: then no such file is made",
            path=folder,
        ) from error
    end = 0

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        nonlocal end
        begin = end
        size = math.prod(shape) * dtype.itemsize
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return memory[begin : begin + size].view(dtype).reshape(shape)

    yield allocate
