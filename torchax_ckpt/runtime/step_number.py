"""Validation of step numbers."""

from __future__ import annotations

import operator
from typing import Any

from torchax_ckpt.errors import StepError, StepTypeError


def as_step(step: Any) -> int:
    """Returns the step as an int. ``step`` may be a numpy integer, but not a bool.

    Raises:
      StepTypeError: the step is not an integer.
      StepError: the step is negative.
    """
    if type(step).__name__ in ("bool", "bool_"):
        raise StepTypeError(f"step: expected an int, found {step!r}")
    try:
        number = operator.index(step)
    except TypeError:
        raise StepTypeError(f"step: expected an int, found {step!r:.80}") from None
    if number < 0:
        raise StepError(f"step: expected 0 or more, found {number}", step=number)
    return number
