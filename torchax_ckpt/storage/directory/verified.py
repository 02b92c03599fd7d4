"""Tracks the verified steps: a full read found them intact, and no later read found damage."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.storage.medium import permissions

if TYPE_CHECKING:
    from torchax_ckpt.storage.directory.committed_step import CommittedStep

logger = logging.getLogger(__name__)

# The mark of a verified step: an empty file in it.
MARK = "verified"


class Verified:
    """Knows the verified steps of a directory, from reads in this process and from mark files."""

    def __init__(self) -> None:
        self._noted: dict[tuple[int, int], bool] = {}  # step's key -> whether it was intact
        self._written: set[tuple[int, int]] = set()

    def note(self, committed: CommittedStep, *, is_sound: bool) -> None:
        """Records in memory that a full read found the step intact, or that a read found damage."""
        self._noted[committed.key] = is_sound
        self._written.discard(committed.key)

    def forget(self, committed: CommittedStep) -> None:
        """Removes from memory whether the step, which was deleted, was intact or damaged."""
        self._noted.pop(committed.key, None)
        self._written.discard(committed.key)

    @contextlib.contextmanager
    def noting_damage(self, committed: CommittedStep) -> Iterator[None]:
        """Records the step as damaged if the ``with`` block raises CorruptCheckpointError."""
        try:
            yield
        except CorruptCheckpointError:
            self.note(committed, is_sound=False)
            raise

    def mark(self, steps: Iterable[CommittedStep]) -> None:
        """Creates or deletes mark files for later programs, as steps are intact or damaged.

        Failures are only logged.
        """
        for committed in steps:
            key = committed.key
            if key not in self._noted or key in self._written:
                continue
            path = committed.path / MARK
            try:
                permissions.make_file(path) if self._noted[key] else path.unlink(missing_ok=True)
                self._written.add(key)
            except Exception as error:  # each client of a bucket has its own error types
                logger.info("%s cannot be created or deleted: %s", path, error)

    def is_damaged(self, committed: CommittedStep) -> bool:
        """Returns whether a read or the listing of the directory found the step damaged."""
        return committed.has_lost_record or not self._noted.get(committed.key, True)

    def __contains__(self, committed: CommittedStep) -> bool:
        found = False if self.is_damaged(committed) else self._noted.get(committed.key)
        return (committed.path / MARK).exists() if found is None else found

    def named(self, steps: Iterable[CommittedStep]) -> str:
        """Returns text that names the (at most five) newest steps not known to be damaged."""
        sound = [s for s in steps if not self.is_damaged(s)][-5:]
        return ", ".join(f"{s.step}{' (verified)' * (s in self)}" for s in sound) or "none"

    def sparing_newest(self, keep: Sequence[bool], steps: Sequence[CommittedStep]) -> list[bool]:
        """Returns which steps, oldest first, are kept if the newest verified one is kept too."""
        spared = list(keep)
        # Whether a step is verified is asked of as few as possible: the answer may be on storage.
        for index in reversed(range(len(steps))):
            if not keep[index] and steps[index] in self:
                spared[index] = not any(step in self for step in steps[index + 1 :])
                break
        return spared
