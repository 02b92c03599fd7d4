"""The stages of saves, restores, claims and exchanges, by name: where each can be interrupted.

The functions that do the work of a stage are marked with its name. The package itself never looks
at stages. Whoever tests it does: there a process is killed, stopped or made to fail, before or
after a stage, at any of its times. The names outlive the functions.
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
    "link unchanged arrays",
    "write the arrays",
    "complete the step",
    "commit",
    "mark the step",
    "commit a part",
    "commit the folder",
    "end a durable save",
    "read back",
    # of what a save does with other steps
    "settle a step",
    "set steps aside",
    "delete a step",
    # of a restore
    "read the arrays",
    "change the objects",
    # of an exchange of messages
    "gather",
    "share",
    "end a round",
]
STAGES: tuple[Stage, ...] = get_args(Stage)

# What each stage runs in, from the outermost on: they see that it begins, ends and fails. They are
# given its name, and the path that it works on if it is marked with that.
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
