"""What is imported at its first use: JAX and Orbax, which a program that reads steps may lack."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any


def attributes(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a package's ``__getattr__``, which imports names, or modules: name -> module."""

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{modules[name]}")
        value = module if name == modules[name] else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return get


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
