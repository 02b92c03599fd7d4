"""Continuous, asynchronous, sharded checkpoints for PyTorch programs on JAX through torchax."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchax_ckpt import errors
from torchax_ckpt.options import CheckpointOptions, LocalTier

if TYPE_CHECKING:
    from torchax_ckpt import planning, policies
    from torchax_ckpt.checkpointer import TorchaxCheckpointer
    from torchax_ckpt.formats.state_dict import load_torch_state_dict
    from torchax_ckpt.restoring import RestoreReport

__all__ = [
    "CheckpointOptions",
    "LocalTier",
    "RestoreReport",
    "TorchaxCheckpointer",
    "errors",
    "load_torch_state_dict",
    "planning",
    "policies",
]

# Loaded when first used: all but planning import JAX and Orbax, and most torchax.
_LAZY = {
    "RestoreReport": "torchax_ckpt.restoring",
    "TorchaxCheckpointer": "torchax_ckpt.checkpointer",
    "load_torch_state_dict": "torchax_ckpt.formats.state_dict",
    "planning": "torchax_ckpt.planning",
    "policies": "torchax_ckpt.policies",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    value = module if module.__name__.endswith(f".{name}") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
