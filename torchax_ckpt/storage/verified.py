"""Owns which steps count as verified: read back whole once, and found as they were saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torchax_ckpt.storage import modes

if TYPE_CHECKING:
    from torchax_ckpt.storage.directory import CommittedStep

# An empty file in the step.
MARK = "verified"


class Verified:
    """The verified steps of a directory: noted in this process, or marked by an earlier one."""

    def __init__(self) -> None:
        self._noted: dict[tuple[int, int], bool] = {}  # step -> whether its mark is written

    def note(self, committed: CommittedStep) -> None:
        """Takes it that the step is verified, in this process alone."""
        self._noted.setdefault((committed.step, committed.commit_timestamp_nsecs), False)

    def mark(self, steps: Iterable[CommittedStep]) -> None:
        """Writes it down in those of the steps that were noted."""
        for committed in steps:
            key = (committed.step, committed.commit_timestamp_nsecs)
            if self._noted.get(key) is False:
                modes.make_file(committed.path / MARK)
                self._noted[key] = True

    def __contains__(self, committed: CommittedStep) -> bool:
        key = (committed.step, committed.commit_timestamp_nsecs)
        return key in self._noted or (committed.path / MARK).exists()

    def newest_of(
        self, doomed: list[CommittedStep], steps: Iterable[CommittedStep]
    ) -> CommittedStep | None:
        """The newest verified of all steps, oldest first, if it is one of the doomed."""
        for candidate in reversed(doomed):
            if candidate in self:
                newer = (s for s in steps if s.step > candidate.step)
                return None if any(s in self for s in newer) else candidate
        return None
