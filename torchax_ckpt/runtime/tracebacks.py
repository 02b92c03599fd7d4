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


def shorten(error: CheckpointError) -> None:
    """Cuts the frames off an error, unless other code raised it; the public function calls this."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    if all(f.f_globals.get("__name__", "").partition(".")[0] in _OWN for f in frames):
        error.__traceback__ = None


def brief(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function: the tracebacks of its errors end at its call."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except CheckpointError as error:
            shorten(error)
            raise

    return called
