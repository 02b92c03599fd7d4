"""Counts the saves to a bucket that failed when they took databases over."""

from __future__ import annotations

_MAX_DOUBLINGS = 6


class Refusals:
    """Says how many saves write all arrays after a save that took databases over has failed.

    A bucket that refuses every copy must not fail every other save. So after 1, 2, 3, ... such
    failures in a row, the next 2, 4, 8, ... saves take nothing over, at most 64.

    Attributes:
      num_in_full: how many of the next saves take nothing over.
    """

    def __init__(self) -> None:
        self._num_failed = self.num_in_full = 0

    def add(self) -> None:
        """Records that a save that took databases over has failed."""
        self._num_failed = min(self._num_failed + 1, _MAX_DOUBLINGS)
        self.num_in_full = 2**self._num_failed

    def over(self) -> None:
        """Records that a save that took databases over is durable."""
        self._num_failed = 0

    def begin(self) -> bool:
        """Returns whether the save that begins may take databases over."""
        if not self.num_in_full:
            return True
        self.num_in_full -= 1
        return False
