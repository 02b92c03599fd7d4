"""Owns telling which of the known forms files of weights have."""

from __future__ import annotations

from pathlib import Path

from torchax_ckpt.errors import SelectionError
from torchax_ckpt.formats.dcp import is_dcp, open_dcp
from torchax_ckpt.formats.safetensors_io import is_safetensors, open_safetensors
from torchax_ckpt.formats.tensor_files import TensorFiles
from torchax_ckpt.formats.torch_reading import is_torch_file, open_torch_file


def is_known(path: Path) -> bool:
    """Whether there is something that ``open_files`` takes."""
    return is_dcp(path) or is_torch_file(path) or is_safetensors(path)


def open_files(path: Path, at: str | None = None) -> TensorFiles:
    """Opens weights that another program has written; reads no tensor yet.

    Args:
      path: a directory of ``torch.distributed.checkpoint``, a file of ``torch.save``'s, or
        safetensors: a file, or a directory or index as Hugging Face writes them.
      at: keys of the place where the weights are, joined with ``/``.

    Raises:
      SelectionError: ``at`` was given for safetensors, which have no places.
      CorruptCheckpointError, DirectoryError, MismatchError, UnsupportedLeafError, ImportError: as
        of ``open_dcp``, ``open_torch_file`` and ``open_safetensors``.
    """
    if is_dcp(path):
        return open_dcp(path, at)
    if is_torch_file(path):
        return open_torch_file(path, at)
    if at is not None:
        raise SelectionError(
            f"{path}: was written neither by torch.save nor by torch's DCP, and only those have "
            f"places: safetensors have no places such as {at!r}"
        )
    return open_safetensors(path)
