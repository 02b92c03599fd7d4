"""Checks the arguments of planning functions and raises PlanError for impossible values."""

from __future__ import annotations

import math

from torchax_ckpt.errors import PlanError


def at_least(name: str, value: float, least: float, hint: str) -> None:
    """Raises PlanError unless ``value`` is a finite number of at least ``least``.

    Raises:
      PlanError: the check fails. The message has the name, the value and the hint.
    """
    if not is_number(value) or not least <= value < math.inf:
        raise PlanError(f"{name}: expected a number >= {least:g}, found {value!r}; {hint}")


def positive(name: str, value: float, hint: str) -> None:
    """Raises PlanError unless ``value`` is a finite number above zero.

    Raises:
      PlanError: the check fails. The message has the name, the value and the hint.
    """
    if not is_number(value) or not 0 < value < math.inf:
        raise PlanError(f"{name}: expected a positive number, found {value!r}; {hint}")


def count(name: str, value: int, hint: str) -> None:
    """Raises PlanError unless ``value`` is an int above zero.

    Raises:
      PlanError: the check fails. The message has the name, the value and the hint.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name}: expected a positive int, found {value!r}; {hint}")


def fraction(name: str, value: float, hint: str) -> None:
    """Raises PlanError unless ``value`` is a number from 0 to 1.

    Raises:
      PlanError: the check fails. The message has the name, the value and the hint.
    """
    if not is_number(value) or not 0 <= value <= 1:
        raise PlanError(f"{name}: expected a number from 0 to 1, found {value!r}; {hint}")


def save_times(blocking_secs: float, durable_secs: float, slowdown: float) -> None:
    """Raises PlanError if a value is negative or ``durable_secs`` is below ``blocking_secs``.

    Raises:
      PlanError: a value is negative, or the save is durable before it stops blocking.
    """
    at_least("blocking_secs", blocking_secs, 0, "give the seconds that one save blocks training")
    at_least(
        "durable_secs",
        durable_secs,
        blocking_secs,
        f"it lasts from the snapshot to the commit, so it includes the {blocking_secs:g} s of "
        "blocking_secs; both are equal if saves are synchronous",
    )
    at_least("slowdown", slowdown, 0, "0.05 means that steps take 5 % longer during a save")


def is_number(value: object) -> bool:
    """Returns whether a value is an int or a float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
