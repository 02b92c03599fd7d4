"""Lets PyTorch Lightning train, save and resume on JAX devices through torchax."""

from __future__ import annotations

try:
    import lightning.pytorch  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        'torchax_ckpt.integrations.lightning needs its extra: pip install "torchax-ckpt[lightning]"'
    ) from error

from torchax_ckpt.integrations.lightning.checkpoint import TorchaxCheckpoint
from torchax_ckpt.integrations.lightning.strategy import TorchaxStrategy

__all__ = ["TorchaxCheckpoint", "TorchaxStrategy"]
