"""Imports JAX and Orbax at their first use: a program that only reads steps may lack them."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any


def attributes(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a package's ``__getattr__``; ``modules`` is name -> the module that has the name.

    A name that equals its module stands for the module itself.
    """

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
            with root_logger_left_alone():
                # Waits for imports on other threads.
                self._module = importlib.import_module(self._name)
        return getattr(self._module, name)


_has_imported_absl = False


@contextlib.contextmanager
def root_logger_left_alone() -> Iterator[None]:
    """Removes the handler that absl gives to the root logger if Orbax logs in the ``with`` block.

    With this handler, a later ``logging.basicConfig`` of the program would do nothing. Removes
    nothing if the program had set up the root logger, or had imported Orbax or absl itself.
    """
    global _has_imported_absl
    root = logging.getLogger()
    _has_imported_absl |= not {"absl", "orbax"} & sys.modules.keys()
    adds_it = _has_imported_absl and not root.handlers
    try:
        yield
    finally:
        for handler in list(root.handlers) if adds_it else ():
            root.removeHandler(handler)


if TYPE_CHECKING:
    import jax as jax
    from orbax import checkpoint as orbax
else:
    jax, orbax = _Library("jax"), _Library("orbax.checkpoint")
