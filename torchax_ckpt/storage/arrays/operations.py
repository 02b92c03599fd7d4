"""The operation (a save or load) for which the current thread works."""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable


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
