"""Opens weight files that other programs wrote, in any of the supported formats."""

from __future__ import annotations

from pathlib import Path

from torchax_ckpt.errors import SelectionError
from torchax_ckpt.formats.dcp import is_dcp, open_dcp
from torchax_ckpt.formats.safetensors_io import is_safetensors, open_safetensors
from torchax_ckpt.formats.tensor_files import TensorFiles
from torchax_ckpt.formats.torch_reading import is_torch_file, open_torch_file


def is_known(path: Path) -> bool:
    """Returns whether the path is any file, or a directory with a DCP checkpoint or safetensors."""
    return is_dcp(path) or is_torch_file(path) or is_safetensors(path)


def open_files(path: Path, at: str | None = None) -> TensorFiles:
    """Opens weights that another program wrote, without reading a tensor.

    ``at`` are the keys that lead to the weights, joined with ``/``; None for the default place.
    Raises SelectionError for ``at`` with safetensors, whose names are not nested; MismatchError
    without tensors under ``at``; UnsupportedLeafError for what cannot be stored, or two tensors of
    one name; CorruptCheckpointError; DirectoryError; and ImportError without the safetensors
    library.
    """
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
