"""Files in torch's own formats, sound and hostile, and what the package reads of them."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from support.training import before_enabling
from torchax_ckpt import torchax_backend
from torchax_ckpt.formats.importing import open_files


def save_torch(value: Any, path: Path, **how: Any) -> Path:
    with torchax_backend.native_torch():
        torch.save(value, path, **how)
    return path


def save_dcp(tensors: Any, folder: Path, *, num_files: int = 2) -> Path:
    with before_enabling(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is only one process.
        # With copying ahead, torch would use streams, which torchax's device module lacks.
        writer = dcp.FileSystemWriter(folder, thread_count=num_files, per_thread_copy_ahead=0)
        dcp.save(tensors, storage_writer=writer)
    return folder


def arrays_in(path: Path, at: str | None = None) -> dict[str, np.ndarray]:
    """What ``import`` and ``warm_start`` read of files: name -> the whole tensor."""
    return {name: tensor.mapped() for name, tensor in open_files(path, at).tensors.items()}


def archive(path: Path, pickled: bytes, how: int = zipfile.ZIP_STORED, **members: bytes) -> Path:
    """An archive in the form of torch.save's, with this pickle and these storages."""
    with zipfile.ZipFile(path, "w", how) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", "little")
        for key, content in {"0": bytes(24), **members}.items():
            file.writestr(f"archive/data/{key}", content)
        file.writestr("archive/version", "3\n")
    return path


class _Storage:
    """Is pickled as a reference to a storage of an archive."""


def pickled_tensor(
    begin: Any = 0,
    size: Any = (2, 3),
    strides: Any = (3, 1),
    key: Any = "0",
    num_elements: Any = 6,
    is_alone: bool = False,
) -> bytes:
    """The pickle of a float32 tensor that is described like this, alone or as the dict's ``w``."""

    class Tensor:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (_Storage(), begin, size, strides, False, {})

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            is_storage = isinstance(value, _Storage)
            return ("storage", torch.FloatStorage, key, "cpu", num_elements) if is_storage else None

    file = io.BytesIO()
    Pickler(file, protocol=2).dump(Tensor() if is_alone else {"w": Tensor()})
    return file.getvalue()


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("run by a pickle",))
