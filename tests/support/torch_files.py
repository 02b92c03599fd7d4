"""Files in torch's own formats."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from support.training import before_enabling


def save_dcp(tensors: Any, folder: Path, *, num_files: int = 2) -> Path:
    with before_enabling(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is only one process.
        # With copying ahead, torch would use streams, which torchax's device module lacks.
        writer = dcp.FileSystemWriter(folder, thread_count=num_files, per_thread_copy_ahead=0)
        dcp.save(tensors, storage_writer=writer)
    return folder


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("run by a pickle",))
