"""Owns which steps count as verified: read back whole, found as they were saved, and not since
found otherwise.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.storage.medium import permissions

if TYPE_CHECKING:
    from torchax_ckpt.storage.directory.committed_step import CommittedStep

logger = logging.getLogger(__name__)

# An empty file in the step.
MARK = "verified"


class Verified:
    """The verified steps of a directory: noted in this process, or marked by an earlier one."""

    def __init__(self) -> None:
        self._noted: dict[tuple[int, int], bool] = {}  # step -> as what it was found
        self._written: set[tuple[int, int]] = set()

    def note(self, committed: CommittedStep, *, is_sound: bool) -> None:
        """Takes it that the step was read whole and is sound, or that it is damaged."""
        self._noted[committed.key] = is_sound
        self._written.discard(committed.key)

    def forget(self, committed: CommittedStep) -> None:
        """Lets go of what was noted of a step that was deleted."""
        self._noted.pop(committed.key, None)
        self._written.discard(committed.key)

    @contextlib.contextmanager
    def noting_damage(self, committed: CommittedStep) -> Iterator[None]:
        """Notes it of the step if what is read of it in the block turns out to be damaged."""
        try:
            yield
        except CorruptCheckpointError:
            self.note(committed, is_sound=False)
            raise

    def mark(self, steps: Iterable[CommittedStep]) -> None:
        """Has those of the steps that were noted say so to later programs."""
        for committed in steps:
            key = committed.key
            if key not in self._noted or key in self._written:
                continue
            path = committed.path / MARK
            try:
                permissions.make_file(path) if self._noted[key] else path.unlink(missing_ok=True)
                self._written.add(key)
            except Exception as error:  # each client of a bucket has errors of its own
                logger.info("%s is not changed: %s", path, error)

    def is_damaged(self, committed: CommittedStep) -> bool:
        """Whether the step is known to be damaged, by what was noted or since it was listed."""
        return committed.has_lost_record or not self._noted.get(committed.key, True)

    def __contains__(self, committed: CommittedStep) -> bool:
        found = False if self.is_damaged(committed) else self._noted.get(committed.key)
        return (committed.path / MARK).exists() if found is None else found

    def named(self, steps: Iterable[CommittedStep]) -> str:
        """The newest of the steps, oldest first, that are not known to be damaged, in words."""
        sound = [s for s in steps if not self.is_damaged(s)][-5:]
        return ", ".join(f"{s.step}{' (verified)' * (s in self)}" for s in sound) or "none"

    def newest_of(
        self, doomed: list[CommittedStep], steps: Iterable[CommittedStep]
    ) -> CommittedStep | None:
        """The newest verified of all steps, oldest first, if it is one of the doomed."""
        for candidate in reversed(doomed):
            if candidate in self:
                newer = (s for s in steps if s.step > candidate.step)
                return None if any(s in self for s in newer) else candidate
        return None
