"""Checks the arguments of planning functions and raises PlanError for impossible values."""

from __future__ import annotations

import math

from torchax_ckpt.errors import PlanError


def at_least(name: str, value: float, least: float, hint: str) -> None:
    """Raises PlanError unless ``value`` is a finite number of at least ``least``."""
    if not _is_number(value) or not least <= value < math.inf:
        raise PlanError(f"{name}: expected a number >= {least:g}, found {value!r}; {hint}")


def positive(name: str, value: float, hint: str) -> None:
    """Raises PlanError unless ``value`` is a finite number above zero."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise PlanError(f"{name}: expected a positive number, found {value!r}; {hint}")


def count(name: str, value: int, hint: str) -> None:
    """Raises PlanError unless ``value`` is an int above zero."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name}: expected a positive int, found {value!r}; {hint}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
