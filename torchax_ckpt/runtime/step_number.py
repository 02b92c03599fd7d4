"""Validation of step numbers."""

from __future__ import annotations

import operator
from typing import Any

from torchax_ckpt.errors import StepError, StepTypeError


def as_step(step: Any) -> int:
    """Returns the step as an int; ``step`` may be an integer array or tensor without dims.

    Raises:
      StepTypeError: the step is not an integer, such as a bool or an array with dims.
      StepError: the step is negative.
    """
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
