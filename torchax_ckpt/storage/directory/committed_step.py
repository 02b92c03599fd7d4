"""Defines a committed step, and the names of a step's items: arrays, manifest, summary, assets."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from etils import epath

from torchax_ckpt.errors import CheckpointError

E = TypeVar("E", bound=CheckpointError)

# The items of a step: its arrays, and three JSON objects. Not every step has assets.
STATE = "state"
MANIFEST = "manifest"
SUMMARY = "summary"
ASSETS = "assets"
# The commit time of a step whose commit record is damaged.
LOST = 0


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

    def error(self, kind: type[E], text: str, key_path: str | None = None) -> E:
        """Returns an error about this step, whose message names the step and its path."""
        message = f"step {self.step} in {self.path}: {text}"
        return kind(message, step=self.step, path=self.path, key_path=key_path)

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


def described(steps: Iterable[CommittedStep]) -> list[list[Any]]:
    """Returns the steps as lists that JSON can store, to send to other processes of the run."""
    return [[s.step, s.path.name, s.commit_timestamp_nsecs, s.is_incoming] for s in steps]


def named(described: Iterable[Sequence[Any]], directory: epath.Path) -> list[CommittedStep]:
    """Rebuilds steps from what the function ``described`` returned in this or another process."""
    return [CommittedStep(n, directory / name, *rest) for n, name, *rest in described]
