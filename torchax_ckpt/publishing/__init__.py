"""Publishing: finished steps of a run become folders that other programs load.

``torchax-ckpt follow`` and ``torchax_ckpt.integrations.huggingface.Publisher`` are made of this.
The programs that load the folders may use ``Reader``; it imports neither torchax, JAX nor Orbax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchax_ckpt.runtime.lazily import attributes

if TYPE_CHECKING:
    from torchax_ckpt.publishing.reader import Reader

__all__ = ["Reader"]

__getattr__ = attributes(__name__, {"Reader": "reader"})
