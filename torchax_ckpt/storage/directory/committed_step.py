"""Defines a committed step, names the step's items, and knows which steps were verified."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from etils import epath

from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StepNotFoundError,
    StepTypeError,
)
from torchax_ckpt.storage.medium import medium

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=CheckpointError)

# The items of a step: its arrays, and three JSON objects. Not every step has assets.
STATE = "state"
MANIFEST = "manifest"
SUMMARY = "summary"
ASSETS = "assets"
# The field of a summary that says how its program ranks metrics: metric -> "min" or "max".
RANKS = "ranks"
# The mark of a verified step: an empty file in it.
VERIFIED = "verified"
# The commit time of a step whose commit record is damaged.
LOST = 0
# The largest number of a step: a signed integer of 64 bits, as ``time.time_ns()`` is.
MAX_STEP = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class CommittedStep:
    """A step that was committed; the commit time tells it from others of the same number."""

    step: int  # completed optimizer steps
    path: epath.Path
    commit_timestamp_nsecs: int  # since 1970; LOST if the record that holds it is damaged
    is_incoming: bool = False  # whether it waits to replace an abandoned step of the same number

    @property
    def key(self) -> tuple[int, int]:
        """The pair of number and commit time; identifies a step whose commit record is intact."""
        return self.step, self.commit_timestamp_nsecs

    @property
    def has_lost_record(self) -> bool:
        """Whether the commit record was damaged, so that the step's commit time is unknown."""
        return self.commit_timestamp_nsecs == LOST

    def error(
        self, kind: type[E], text: str, key_path: str | None = None, file: str | None = None
    ) -> E:
        """Returns an error about this step, whose message names the step and its path."""
        message = f"step {self.step} in {self.path}: {text}"
        return kind(message, step=self.step, path=self.path, file=file, key_path=key_path)

    @property
    def age_secs(self) -> float | None:
        """Seconds since the commit; None if the commit time is unknown."""
        if self.has_lost_record:
            return None
        # The clock of the host that committed it may be ahead.
        return max(0.0, time.time() - self.commit_timestamp_nsecs / 1e9)

    def age(self) -> str:
        """Returns the time since the commit as text, for example ``5 min``."""
        return time_since(self.commit_timestamp_nsecs / 1e9)


def time_since(then_secs: float) -> str:
    """Returns the time that has passed since a moment, in seconds since 1970, as text."""
    secs = max(0.0, time.time() - then_secs)
    for limit, unit, unit_secs in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if secs < limit:
            return f"{secs / unit_secs:.0f} {unit}"
    return f"{secs / 86_400:.0f} d"


def to_json(steps: Iterable[CommittedStep]) -> list[list[Any]]:
    """Returns the steps as lists that JSON can store, to send to other processes of the run."""
    return [[s.step, s.path.name, s.commit_timestamp_nsecs, s.is_incoming] for s in steps]


def from_json(raw: Iterable[Sequence[Any]], directory: epath.Path) -> list[CommittedStep]:
    """Rebuilds steps from what ``to_json`` returned in this process or another."""
    return [CommittedStep(n, directory / name, *rest) for n, name, *rest in raw]


def chosen(
    available: Sequence[CommittedStep], step: int | None, directories: Sequence[epath.Path]
) -> list[CommittedStep]:
    """Returns all steps found, or those of one number; StepNotFoundError if there are none."""
    if step is not None and (isinstance(step, bool) or not hasattr(step, "__index__")):
        raise StepTypeError(f"step: expected an int or None, found {step!r:.80}")
    if steps := [s for s in available if step is None or s.step == step]:
        return steps
    text = "there are no checkpoints"
    if step is not None:
        there = ", ".join(map(str, sorted({s.step for s in available}))) or "none"
        text = f"no checkpoint at step {step}; there are: {there}"
    where = " and ".join(map(str, directories))
    raise StepNotFoundError(f"{where}: {text}", step=step, path=directories[0])


class Verified:
    """Knows the steps that a full read found intact, and in which no later read found damage."""

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
        """Creates or deletes steps' mark files, for later programs; failures are only logged."""
        for committed in steps:
            key = committed.key
            if key not in self._noted or key in self._written:
                continue
            path = committed.path / VERIFIED
            try:
                if self._noted[key]:
                    medium.of(path).make_file(path)
                else:
                    path.unlink(missing_ok=True)
                self._written.add(key)
            except Exception as error:  # each client of a bucket has its own error types
                logger.debug("%s cannot be created or deleted: %s", path, error)

    def is_damaged(self, committed: CommittedStep) -> bool:
        """Returns whether a read or the listing of the directory found the step damaged."""
        return committed.has_lost_record or not self._noted.get(committed.key, True)

    def __contains__(self, committed: CommittedStep) -> bool:
        noted = False if self.is_damaged(committed) else self._noted.get(committed.key)
        return (committed.path / VERIFIED).exists() if noted is None else noted

    def named(self, steps: Iterable[CommittedStep]) -> str:
        """Returns text that names the (at most five) newest steps not known to be damaged."""
        sound = [s for s in steps if not self.is_damaged(s)][-5:]
        return ", ".join(f"{s.step}{' (verified)' * (s in self)}" for s in sound) or "none"

    def sparing_newest(
        self, are_kept: Sequence[bool], steps: Sequence[CommittedStep]
    ) -> list[bool]:
        """Returns which steps, oldest first, are kept if the newest verified one is kept too."""
        spared = list(are_kept)
        # Looks at as few steps as possible, because whether a step is verified may be on storage.
        for index in reversed(range(len(steps))):
            if not are_kept[index] and steps[index] in self:
                spared[index] = not any(step in self for step in steps[index + 1 :])
                break
        return spared
