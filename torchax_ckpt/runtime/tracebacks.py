"""Ends the tracebacks of this package's errors at the public function that the user called."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torchax_ckpt.errors import CheckpointError

P = ParamSpec("P")
R = TypeVar("R")

_OWN = frozenset({__name__.partition(".")[0], "asyncio", "concurrent", "contextlib"})


def brief(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function: the tracebacks of this package's errors end at its call.

    Those that other code raised, such as an attached object, are left whole.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except CheckpointError as error:
            frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
            if all(f.f_globals.get("__name__", "").partition(".")[0] in _OWN for f in frames):
                error.__traceback__ = None
            raise

    return called
