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
    from torchax_ckpt.restoring.restore_report import RestoreReport
    from torchax_ckpt.restoring.warm_start import warm_start
    from torchax_ckpt.state.random_state import RandomState
    from torchax_ckpt.telemetry.events import Event
    from torchax_ckpt.telemetry.stats import Stats

__all__ = [
    "CheckpointOptions",
    "Event",
    "LocalTier",
    "RandomState",
    "RestoreReport",
    "Stats",
    "TorchaxCheckpointer",
    "errors",
    "load_torch_state_dict",
    "planning",
    "policies",
    "warm_start",
]

# These names and ``_MODULES`` are loaded at first use, because most import JAX, Orbax or torchax.
_LAZY = {
    "Event": "torchax_ckpt.telemetry.events",
    "RandomState": "torchax_ckpt.state.random_state",
    "RestoreReport": "torchax_ckpt.restoring.restore_report",
    "Stats": "torchax_ckpt.telemetry.stats",
    "TorchaxCheckpointer": "torchax_ckpt.checkpointer",
    "load_torch_state_dict": "torchax_ckpt.formats.state_dict",
    "warm_start": "torchax_ckpt.restoring.warm_start",
}
_MODULES = {name: f"torchax_ckpt.{name}" for name in ("planning", "policies")}


def __getattr__(name: str) -> Any:
    if name not in {**_LAZY, **_MODULES}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module({**_LAZY, **_MODULES}[name])
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
