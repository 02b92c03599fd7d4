"""Owns what is known of a step that was committed, and the names of its items."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from etils import epath

# Items of a step: its arrays, and JSON.
STATE = "state"
MANIFEST = "manifest"
SUMMARY = "summary"
LOST = 0


@dataclasses.dataclass(frozen=True)
class CommittedStep:
    """A step that was committed.

    Attributes:
      step: completed optimizer steps.
      path: its directory.
      commit_timestamp_nsecs: when it was committed; also what tells it from another step of the
        same number. 0 where the record that says so is damaged.
      is_incoming: whether it waits to take the place of an abandoned step.
    """

    step: int
    path: epath.Path
    commit_timestamp_nsecs: int
    is_incoming: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """What tells it from every other step of the run."""
        return self.step, self.commit_timestamp_nsecs

    @property
    def has_lost_record(self) -> bool:
        """Whether its commit record was damaged when it was listed: it cannot be read."""
        return self.commit_timestamp_nsecs == LOST


def described(steps: Iterable[CommittedStep]) -> list[list[Any]]:
    """Steps as JSON, for other processes of the run."""
    return [[s.step, s.path.name, s.commit_timestamp_nsecs, s.is_incoming] for s in steps]


def named(described: Iterable[Sequence[Any]], directory: epath.Path) -> list[CommittedStep]:
    """The steps that ``described`` has described, perhaps in another process, in a directory."""
    return [CommittedStep(n, directory / name, *rest) for n, name, *rest in described]
