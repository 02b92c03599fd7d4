"""The stages of saves, restores, claims and exchanges, by name: where each can be interrupted.

The functions that do the work of a stage are marked with its name. Only tests look at stages: they
kill or stop a process, or make it fail, before or after a stage, at any of the times that it runs.
The names stay when the functions change.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, ParamSpec, TypeVar, get_args

P = ParamSpec("P")
R = TypeVar("R")

Stage = Literal[
    # of a directory
    "claim the directory",
    "recover the directory",
    "name the run",
    "write the name",
    "check the lease",
    # of a save, in their order
    "take the snapshot",
    "stack the arrays",
    "link unchanged arrays",
    "write the arrays",
    "complete the step",
    "commit",
    "mark the step",
    "commit a part",
    "commit the folder",
    "end a durable save",
    "read back",
    # of a save's work on other steps
    "settle a step",
    "set steps aside",
    "delete a step",
    # of a mirror
    "copy to the mirror",
    "fetch from the mirror",
    # of a restore
    "read the arrays",
    "change the objects",
    # of an exchange of messages
    "gather",
    "share",
    "end a round",
]
STAGES: tuple[Stage, ...] = get_args(Stage)

# Each stage runs inside the context managers that these return, which see it begin, end and fail.
# The first is the outermost. They get the stage's name, and the path that ``where`` picks, or None.
observers: list[Callable[[Stage, object], AbstractContextManager[object]]] = []


def stage(
    name: Stage, where: Callable[..., object] = lambda *args, **options: None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Marks a function as the work of a stage; ``where`` picks the path from its arguments."""

    def marked(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def observed(*args: P.args, **kwargs: P.kwargs) -> R:
            if not observers:
                return function(*args, **kwargs)
            with contextlib.ExitStack() as stack:
                for observe in observers:
                    stack.enter_context(observe(name, where(*args, **kwargs)))
                return function(*args, **kwargs)

        return observed

    return marked
