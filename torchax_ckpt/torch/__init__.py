"""Runs go on in plain PyTorch, on any device: neither torchax, JAX nor Orbax is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchax_ckpt.runtime.lazily import attributes

if TYPE_CHECKING:
    from torchax_ckpt.torch.load_planner import LoadPlanner
    from torchax_ckpt.torch.native_restore import restore
    from torchax_ckpt.torch.storage_reader import StorageReader

__all__ = ["LoadPlanner", "StorageReader", "restore"]

# Loaded at first use, because torch.distributed.checkpoint takes longer to import than the rest.
_MODULES = {
    "LoadPlanner": "load_planner",
    "StorageReader": "storage_reader",
    "restore": "native_restore",
}


__getattr__ = attributes(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted(__all__)
