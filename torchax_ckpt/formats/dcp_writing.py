"""Owns writing what ``torch.distributed.checkpoint`` (DCP) loads, with its own writer."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.formats.state_dict import native_torch


def save_dcp(state: Mapping[str, Any], out: Path) -> None:
    """Writes a nested state dict of plain CPU tensors, from one process.

    Args:
      state: ``model`` and ``optimizer``, as torch's ``get_state_dict`` gives them.
      out: the directory; it has its name once it is complete.

    Raises:
      DirectoryError: it is there already, or cannot be written.
    """
    import torch.distributed.checkpoint as dcp

    if out.exists():
        raise DirectoryError(f"{out}: is there already; nothing was written", path=out)
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        # Nothing is copied ahead: that is for accelerators, and holds more than a tensor.
        writer = dcp.FileSystemWriter(partial, per_thread_copy_ahead=0)
        with warnings.catch_warnings(), native_torch():
            warnings.simplefilter("ignore")
            dcp.save(dict(state), storage_writer=writer, no_dist=True)
        partial.rename(out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, (OSError, RuntimeError, dcp.CheckpointException)):
            raise DirectoryError(f"cannot write {out}: {error!s:.300}", path=out) from error
        raise
