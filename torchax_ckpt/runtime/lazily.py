"""JAX and Orbax, imported at their first use: a program that only reads steps needs neither."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any


class _Library:
    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        module = sys.modules.get(self._module) or importlib.import_module(self._module)
        return getattr(module, name)


if TYPE_CHECKING:
    import jax as jax
    from orbax import checkpoint as orbax
else:
    jax, orbax = _Library("jax"), _Library("orbax.checkpoint")
