"""Owns the checks of what plans are made from: what was expected, what was found, what to do."""

from __future__ import annotations

import math

from torchax_ckpt.errors import PlanError


def at_least(name: str, value: float, least: float, hint: str) -> None:
    """Refuses numbers below ``least``, infinite ones, and what is no number.

    Raises:
      PlanError: with the name, the value and the hint.
    """
    if not is_number(value) or not least <= value < math.inf:
        raise PlanError(f"{name}: expected a number >= {least:g}, found {value!r}; {hint}")


def positive(name: str, value: float, hint: str) -> None:
    """Refuses everything but finite numbers above zero.

    Raises:
      PlanError: with the name, the value and the hint.
    """
    if not is_number(value) or not 0 < value < math.inf:
        raise PlanError(f"{name}: expected a positive number, found {value!r}; {hint}")


def count(name: str, value: int, hint: str) -> None:
    """Refuses everything but ints above zero.

    Raises:
      PlanError: with the name, the value and the hint.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name}: expected a positive int, found {value!r}; {hint}")


def fraction(name: str, value: float, hint: str) -> None:
    """Refuses numbers outside 0 to 1.

    Raises:
      PlanError: with the name, the value and the hint.
    """
    if not is_number(value) or not 0 <= value <= 1:
        raise PlanError(f"{name}: expected a number from 0 to 1, found {value!r}; {hint}")


def save_times(blocking_secs: float, durable_secs: float, slowdown: float) -> None:
    """Refuses times that no save can have.

    Raises:
      PlanError: a time is negative, or the save is durable before it has stopped blocking.
    """
    at_least("blocking_secs", blocking_secs, 0, "give the seconds that one save blocks training")
    at_least(
        "durable_secs",
        durable_secs,
        blocking_secs,
        f"it counts from the snapshot to the commit, so it includes the {blocking_secs:g} s of "
        "blocking_secs; a synchronous save has them equal",
    )
    at_least("slowdown", slowdown, 0, "0.05 means steps that take 5 % longer during a save")


def is_number(value: object) -> bool:
    """Whether it is a real number; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
