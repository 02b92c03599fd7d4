"""The lineage of a step, the starts of programs that led to it; and what a copy of it abandons.

A run with a mirror may continue on another host while its first directory lies idle. When both meet
again, their steps tell whether one of them continues the other. The summary of each step therefore
lists the starts from which the step descends, oldest first:

    "lineage": [["5f0c2a9e81d34b67", -1], ["81aa4c55e0f91b23", 480]]

A start is a random name, and the step from which it continued; -1 stands for the beginning. Every
program makes a start at its first save, and another one after each ``restore``. Numbers only rise
within a start, so these pairs say which steps lie on the way to a step. A step of an older version
lists none; its commit time stands for them, so that a step that continues it can still name it.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.directory.committed_step import CommittedStep

Lineage: TypeAlias = Sequence[tuple[str, int]]

# The field of a step's summary.
SUMMARY_FIELD = "lineage"
BEGINNING = -1
# The oldest starts beyond these are forgotten: no copy of a run stays behind by so many.
_MOST = 1000


def of(summary: Mapping[str, Any]) -> Lineage:
    """Returns the lineage in a step's summary; () without one, or if it is malformed."""
    found = summary.get(SUMMARY_FIELD)
    pairs = found if isinstance(found, list) else []
    if not all(isinstance(p, list) and [type(x) for x in p] == [str, int] for p in pairs):
        return ()
    return tuple((name, step) for name, step in pairs)


def for_summary(lineage: Lineage) -> dict[str, Any]:
    """Returns the field for the summary of a step; {} without a lineage."""
    return {SUMMARY_FIELD: [list(start) for start in lineage]} if lineage else {}


def or_itself(lineage: Lineage | None, committed: CommittedStep) -> Lineage:
    """Returns the lineage of a step, or what stands for it if the step lists none."""
    return lineage or ((str(committed.commit_timestamp_nsecs), BEGINNING),)


def leads_to(
    older: CommittedStep, of_older: Lineage | None, newer: int, of_newer: Lineage | None
) -> bool:
    """Returns whether a step, given with its lineage, lies on the way to another one.

    Without a lineage of the newer one, this is not known, and the answer is False.
    """
    if not of_newer:
        return False
    start = or_itself(of_older, older)[-1][0]
    # Each start goes as far as the step from which the next one continued.
    ends = [*(step for _, step in of_newer[1:]), newer]
    return any(
        name == start and older.step <= end for (name, _), end in zip(of_newer, ends, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class Branch:
    """The steps of a run's branch in one place, oldest first; each one leads to the next.

    ``lineage_of`` returns the lineage of one of them; None if its summary is damaged. ``left``
    returns the keys of the steps that were abandoned, and ``is_damaged`` whether a step is, as far
    as this place knows.
    """

    steps: Sequence[CommittedStep]
    lineage_of: Callable[[CommittedStep], Lineage | None]
    left: Callable[[], Collection[Key]]
    is_damaged: Callable[[CommittedStep], bool]

    def is_sound(self, step: CommittedStep) -> bool:
        """Returns whether a step is not known to be damaged."""
        return not self.is_damaged(step) and self.lineage_of(step) is not None

    @property
    def newest(self) -> CommittedStep | None:
        """The newest sound step."""
        return next(filter(self.is_sound, reversed(self.steps)), None)

    def continues(self, other: CommittedStep, of_other: Lineage | None) -> bool:
        """Returns whether a step, perhaps of another place, is one of these or led to one."""
        if any(step.key == other.key for step in self.steps):
            return True
        if (newest := self.newest) is None:
            return False
        return leads_to(other, of_other, newest.step, self.lineage_of(newest))


def compared(here: Branch, there: Branch) -> Literal["here", "there", "conflict"]:
    """Returns in which of two places a run continues; see ``saving/mirroring/resuming.py``."""
    ours, theirs = here.newest, there.newest
    if ours is None or theirs is None:
        return "there" if theirs or (there.steps and not here.steps) else "here"
    if here.continues(theirs, there.lineage_of(theirs)):
        return "here"
    if there.continues(ours, here.lineage_of(ours)):
        return "there"
    # One of them may have left the step of the other, and no step of its own leads to that.
    if theirs.key in here.left():
        return "here"
    return "there" if ours.key in there.left() else "conflict"


def abandoned_by(
    copied: CommittedStep, source: Branch, target: Branch, sent: Collection[Key] = ()
) -> Sequence[CommittedStep] | None:
    """Returns the target's steps that do not lead to a step of the source, which is copied there.

    ``sent`` are those that were copied from the source before. None: the step is not to be copied,
    because the target has it or continues it.
    """
    if target.continues(copied, source.lineage_of(copied)):
        return None
    older = (step for step in source.steps if step.step < copied.step)
    way = dataclasses.replace(source, steps=[*older, copied])
    left = source.left()
    for number, step in reversed([*enumerate(target.steps, start=1)]):
        was_before = step.key in sent and step.step < copied.step and step.key not in left
        if was_before or way.continues(step, target.lineage_of(step)):
            return target.steps[number:]  # all steps before lead to this one
    return target.steps


@dataclasses.dataclass(frozen=True)
class Start:
    """What each new step of a program records until the program goes back."""

    lineage: Lineage = ()
    # The keys of the steps of a mirror that the program leaves, as it leaves newer steps here.
    left: Sequence[Key] = ()

    @classmethod
    def after(cls, before: Branch, step: int, mirror: Branch | None) -> Start:
        """Returns the start of new steps from ``step`` on, which continue those ``before`` it."""
        # Also one whose arrays were found damaged since: the run continues from what it has read.
        known = (s for s in reversed(before.steps) if before.lineage_of(s) is not None)
        parent, name = next(known, None), uuid.uuid4().hex[:16]
        if parent is None:
            lineage: Lineage = ((name, BEGINNING),)
        else:
            of_parent = or_itself(before.lineage_of(parent), parent)
            lineage = (*of_parent[1 - _MOST :], (name, parent.step))
        if mirror is None:
            return cls(lineage)
        here, left = {ours.key for ours in before.steps}, list[Key]()
        for theirs in reversed(mirror.steps):
            leads = leads_to(theirs, mirror.lineage_of(theirs), step, lineage)
            if leads or theirs.key in here:  # and so do all before it
                break
            left.append(theirs.key)
        return cls(lineage, left)

    @classmethod
    def from_json(cls, raw: Sequence[Any]) -> Start:
        """Rebuilds the start that another process has sent as JSON, as a list of both fields."""
        lineage, left = ([(first, second) for first, second in pairs] for pairs in raw)
        return cls(tuple(lineage), tuple(left))
