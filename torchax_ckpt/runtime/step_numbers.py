"""What users give as a step: its number; or ``latest``, ``best:METRIC`` or ``best:METRIC:max``."""

from __future__ import annotations

import operator
from typing import Any

from torchax_ckpt.errors import StepError, StepTypeError

LATEST = "latest"
BEST = "best:"


def is_name(step: Any) -> bool:
    """Returns whether ``step`` names a step in words, though perhaps by no valid rule."""
    return isinstance(step, str) and (step == LATEST or step.startswith(BEST))


def as_given(step: Any) -> int | str | None:
    """Returns what a call that reads got as a step: its number, a name, or None for the newest.

    Raises StepTypeError and StepError as ``as_step`` does.
    """
    if step is None or is_name(step):
        return step
    if isinstance(step, str):
        raise StepTypeError(
            "step: expected an int, 'latest', 'best:METRIC' or 'best:METRIC:max', found "
            f"{step!r:.80}"
        )
    return as_step(step)


def as_step(step: Any) -> int:
    """Returns the step as an int; ``step`` may be an integer array or tensor without dims.

    Raises:
      StepTypeError: the step is not an integer, such as a bool or an array with dims.
      StepError: the step is negative.
    """
    if type(step) is int and step >= 0:  # at each step of the training loop
        return step
    # operator.index alone takes True, tensor(True) and tensor([3]).
    kind = str(getattr(step, "dtype", type(step).__name__)).removeprefix("torch.")
    try:
        if kind.startswith("bool") or getattr(step, "shape", ()) != ():
            raise TypeError
        number = operator.index(step)
    except TypeError:
        raise StepTypeError(f"step: expected an int, found {step!r:.80}") from None
    if number < 0:
        raise StepError(f"step: expected 0 or more, found {number}", step=number)
    return number
