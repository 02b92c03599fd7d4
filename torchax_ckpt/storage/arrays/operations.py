"""The operation (a save or load) for which the current thread works."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Callable
from typing import Any

from torchax_ckpt.storage.medium import location


@dataclasses.dataclass(frozen=True)
class Operation:
    """What the replacements of Orbax's attributes (``orbax_internals.py``) need about an operation.

    Attributes:
      id: replaces Orbax's number of the operation, and differs from all of Orbax's numbers.
      meet: waits for the operation's other processes at a meeting, given the meeting's name.
      is_alone: True if no other process takes part in the operation.
    """

    id: str
    meet: Callable[[str], None]
    is_alone: bool


current: contextvars.ContextVar[Operation | None] = contextvars.ContextVar(
    "torchax_ckpt_operation", default=None
)
"""The operation for which this thread, or this task of an event loop, works; None for operations
that the program itself starts."""


def is_alone() -> bool:
    """Returns whether this thread works for an operation of this process alone."""
    return (entered := current.get()) is not None and entered.is_alone


class Lookups:
    """Wraps Orbax's ``async_path``, so that a lookup that fails raises its error."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    async def exists(self, path: Any) -> bool:
        """Returns whether a path exists; of local paths, ``os.path.exists`` would hide errors."""
        if current.get() is None or location.is_bucket(path):
            return await self._module.exists(path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            await asyncio.to_thread(os.stat, path)
            return True
        return False
