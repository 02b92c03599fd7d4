"""Continuous, asynchronous, sharded checkpoints for PyTorch programs on JAX through torchax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchax_ckpt import errors
from torchax_ckpt.options import CheckpointOptions, LocalTier, Mirror
from torchax_ckpt.runtime.lazily import attributes

if TYPE_CHECKING:
    from torchax_ckpt import planning, policies, shardings
    from torchax_ckpt.checkpointer import TorchaxCheckpointer
    from torchax_ckpt.compilation.compilation_cache import compilation_cache
    from torchax_ckpt.formats.state_dict import load_torch_state_dict
    from torchax_ckpt.restoring.compiling import compiling
    from torchax_ckpt.restoring.loading import load
    from torchax_ckpt.restoring.warm_start import warm_start
    from torchax_ckpt.state.findings import RestoreReport
    from torchax_ckpt.state.random_state import RandomState
    from torchax_ckpt.telemetry.events import Event
    from torchax_ckpt.telemetry.stats import Stats

    __version__: str

__all__ = [
    "CheckpointOptions",
    "Event",
    "LocalTier",
    "Mirror",
    "RandomState",
    "RestoreReport",
    "Stats",
    "TorchaxCheckpointer",
    "compilation_cache",
    "compiling",
    "errors",
    "load",
    "load_torch_state_dict",
    "planning",
    "policies",
    "shardings",
    "warm_start",
]

# Loaded at first use, because most import JAX, Orbax or torchax.
_LAZY = {
    "Event": "telemetry.events",
    "RandomState": "state.random_state",
    "RestoreReport": "state.findings",
    "Stats": "telemetry.stats",
    "TorchaxCheckpointer": "checkpointer",
    "compilation_cache": "compilation.compilation_cache",
    "compiling": "restoring.compiling",
    "load": "restoring.loading",
    "load_torch_state_dict": "formats.state_dict",
    "planning": "planning",
    "policies": "policies",
    "shardings": "shardings",
    "warm_start": "restoring.warm_start",
}


_lazily = attributes(__name__, _LAZY)


def __getattr__(name: str) -> Any:
    if name != "__version__":
        return _lazily(name)
    from torchax_ckpt.layout.manifest import installed_versions

    return installed_versions()["torchax_ckpt"]


def __dir__() -> list[str]:
    return sorted(__all__)
