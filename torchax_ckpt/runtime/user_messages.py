"""What users read: fields of log records, warnings, and the tracebacks of errors."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

from torchax_ckpt.errors import CheckpointError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_PACKAGE = __name__.partition(".")[0]
_OWN = frozenset({_PACKAGE, "asyncio", "concurrent", "contextlib"})
# Packages whose functions may call this package for a user's program.
_LIBRARIES = {"jax", "lightning", "pytorch_lightning", "threading", "torch", "torchax", "tqdm"}


def fields(**values: Any) -> dict[str, Any]:
    """Returns the ``extra`` of a log record: JSON values, under names that begin with ckpt_."""
    given = {name: value for name, value in values.items() if value is not None}
    plain = (int, float, list)
    return {f"ckpt_{n}": v if isinstance(v, plain) else str(v) for n, v in given.items()}


def counted(number: int, one: str, many: str = "") -> str:
    """Returns a number with its noun: ``1 step``, ``2 steps``; ``many`` if that needs no ``s``."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def tell(logger: logging.Logger, message: str, extra: Mapping[str, Any]) -> None:
    """Logs a message at INFO; prints it on stderr too if no level was set, so that INFO is hidden.

    For messages that are no warnings, but that users should see without any settings.
    """
    logger.info("%s", message, extra=extra)
    package, root = logging.getLogger(_PACKAGE), logging.getLogger()
    if package.level == logging.NOTSET and root.level == logging.WARNING and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # a closed stream
            print(f"{_PACKAGE}: {message}", file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Logs a message as a warning, and issues it as a UserWarning of the user's line too.

    The log reaches the log files of a job; the UserWarning reaches programs that collect warnings.
    It is never raised as an error, because a run must resume under ``python -W error`` too.
    """
    logger.warning("%s", message)
    with contextlib.suppress(UserWarning):  # raised if a filter turns warnings into errors
        level = next((level for level, _, _ in _user_frames(sys._getframe())), 1)
        warnings.warn(message, stacklevel=level)


def user_line() -> str:
    """Returns file and line of the user's program from which this thread has called the package."""
    found = _user_frames(sys._getframe())
    return next((f"{frame.f_code.co_filename}:{n}" for _, frame, n in found), "an unknown line")


def _user_frames(first: types.FrameType) -> Iterator[tuple[int, types.FrameType, int]]:
    """Yields the frames of a user's program that have called one: its level, itself, its line."""
    for level, (frame, line) in enumerate(traceback.walk_stack(first), start=1):
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _OWN | _LIBRARIES:
            yield level, frame, line


def brief(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function: the tracebacks of this package's errors end at its call.

    An error that other code raised, such as an attached object, keeps its whole traceback.
    """

    kind = CheckpointError  # Python may clear the names of this module before the last call

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except kind as error:
            frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
            if all(f.f_globals.get("__name__", "").partition(".")[0] in _OWN for f in frames):
                error.__traceback__ = None
            raise

    return called
