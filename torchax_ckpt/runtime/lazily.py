"""JAX and Orbax, imported at their first use: a program that only reads steps needs neither."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class _Library:
    def __init__(self, name: str) -> None:
        self._name = name
        self._module: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._module is None:
            self._module = importlib.import_module(self._name)  # waits for imports on other threads
        return getattr(self._module, name)


if TYPE_CHECKING:
    import jax as jax
    from orbax import checkpoint as orbax
else:
    jax, orbax = _Library("jax"), _Library("orbax.checkpoint")
