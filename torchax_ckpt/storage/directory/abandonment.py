"""Which steps of a run are abandoned: the one place that decides it.

A run that goes back to an earlier step, or begins anew, leaves a branch: the newer steps are
abandoned. They stay in place until a new step is durable and are then set aside, and nothing
resumes from them. A run that goes back and ends before it saves has abandoned nothing.

A step becomes abandoned in memory first, in the ``Branches`` of each tier that ``run_history.py``
keeps. These steps leave the run's branch:

    - those newer than the step that the run goes on from, in both tiers;
    - those newer than the step that a save begins to write, in both tiers;
    - those in a local tier that not all hosts have;
    - one whose save failed after it was committed.

The next step records it: its summary lists, under ``abandons``, the keys (number and commit time)
of the abandoned steps that are still in place, in both tiers. So a process that is killed before
it could set them aside does not bring them back. Whoever lists a directory afterwards, in this
process or another, takes these for abandoned:

    - what the summaries of the latest commits there list;
    - what those of the run's other tier list;
    - what other hosts have told, each of which knows the summaries in its own local tier only;
    - what an incoming step must have abandoned, if its summary is damaged: older commits from its
      number on. It waits to take the place of an abandoned step, so it has abandoned something.

Of the steps that remain, one counts for each number: the latest commit, or one that is incoming
before one that is not. The others of that number are treated as abandoned. A local tier of another
run has no steps at all; ``run_identity.py`` tells whose it is.

A step is named by its number and commit time, as a later branch may use the number again. Listing
changes nothing. How steps are moved aside is in ``run_directory.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from etils import epath

from torchax_ckpt.storage.directory import committed_step
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.summaries import Summaries
from torchax_ckpt.storage.medium import storage_errors

Key: TypeAlias = tuple[int, int]

# Where the summary of a step lists the steps it abandons, as [number, commit time].
SUMMARY_FIELD = "abandons"
# How many commits may bear later times than the latest of all.
_LATEST = 32


@dataclasses.dataclass(frozen=True)
class Branches:
    """The committed steps of a directory: of the branch that a run is on, and of others.

    Attributes:
      committed: the steps that count, oldest first, one of each number.
      abandoned: the others that are still in place.
    """

    committed: tuple[CommittedStep, ...] = ()
    abandoned: tuple[CommittedStep, ...] = ()

    @classmethod
    def among(cls, found: Sequence[CommittedStep], abandoned: set[Key]) -> Branches:
        """Sorts the steps that were found in a directory, some of which are abandoned."""
        in_order = sorted(found, key=lambda s: (s.is_incoming, s.commit_timestamp_nsecs))
        counted = {s.step: s for s in in_order if s.key not in abandoned}
        return cls(
            tuple(counted[step] for step in sorted(counted)),
            tuple(s for s in found if counted.get(s.step) is not s),
        )

    @property
    def in_place(self) -> tuple[CommittedStep, ...]:
        """All of them: a later step must name the abandoned ones as long as they are there."""
        return (*self.committed, *self.abandoned)

    def newer_than(self, step: int | None) -> list[CommittedStep]:
        """The steps that a run abandons which goes on from this step; all of them for None."""
        newest_first = reversed(self.committed)
        newer = itertools.takewhile(lambda s: step is None or s.step > step, newest_first)
        return list(newer)[::-1]

    def leaving(self, steps: Iterable[CommittedStep]) -> Branches:
        """After some steps were abandoned, of the committed ones or others."""
        left = tuple(steps)
        keys = {s.key for s in left}
        kept = tuple(s for s in self.committed if s.key not in keys)
        return Branches(kept, (*self.abandoned, *left))

    def with_newest(self, durable: CommittedStep) -> Branches:
        """After a step became durable that goes on from the committed ones."""
        return Branches((*self.committed, durable), self.abandoned)

    def moved(self, now: Iterable[CommittedStep]) -> Branches:
        """After steps were moved or deleted, of which these are left; takes where they lie now."""
        now_at = {s.key: s for s in now}
        committed, abandoned = (
            tuple(now_at[s.key] for s in steps if s.key in now_at)
            for steps in (self.committed, self.abandoned)
        )
        return Branches(committed, abandoned)

    def described(self) -> list[Any]:
        """As JSON, for other processes of the run."""
        return [committed_step.described(steps) for steps in (self.committed, self.abandoned)]

    @classmethod
    def named(cls, described: Iterable[Any], directory: epath.Path) -> Branches:
        """What ``described`` has described, perhaps in another process, in a directory."""
        committed, abandoned = (tuple(committed_step.named(d, directory)) for d in described)
        return cls(committed, abandoned)


def to_summary(*tiers: Branches) -> list[list[int]]:
    """What the summary of a step that is saved now says under ``SUMMARY_FIELD``."""
    return [list(s.key) for branches in tiers for s in branches.abandoned]


def from_summary(summary: Mapping[str, Any]) -> set[Key]:
    """What a summary says; whatever is not as ``to_summary`` writes it is left out."""
    entries = summary.get(SUMMARY_FIELD)
    return {
        (entry[0], entry[1])
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, list) and [type(part) for part in entry] == [int, int]
    }


class Abandonment:
    """Knows which steps of one directory are abandoned.

    Args:
      path: of the directory.
      found: lists its committed steps, also those that do not count.
      summaries: of its steps.
      durable: of the durable directory, if this is of the local tier in front of it.
    """

    def __init__(
        self,
        path: epath.Path,
        found: Callable[[], list[CommittedStep]],
        summaries: Summaries,
        durable: Abandonment | None = None,
    ) -> None:
        self._path = path
        self._found = found
        self._summaries = summaries
        self._is_local = durable is not None
        self._other_tier = durable
        self._reported: set[Key] = set()  # by other hosts; of both tiers
        if durable is not None:
            self._reported = durable._reported
            durable._other_tier = self

    def branches(self) -> Branches:
        """Lists the directory, and sorts the steps that are found."""
        found = self._found()
        return Branches.among(found, self._abandoned_keys(found) if found else set())

    def certain_among(self, steps: Sequence[CommittedStep]) -> list[CommittedStep]:
        """The steps that a program may set aside before it has saved anything.

        Not those in the durable tier on the word of local steps, which may yet be lost with their
        host: without them the run goes on from the durable steps that they have abandoned.
        """
        keys = self._abandoned_keys(steps) if self._is_local else self._recorded_in(steps)
        return [s for s in steps if s.key in keys]

    def told(self, steps: Iterable[CommittedStep]) -> bytes:
        """What this host tells the others: the steps that count here, and which are abandoned."""
        return json.dumps([[s.key for s in steps], sorted(self._recorded())]).encode()

    def learn(self, sent: Iterable[bytes]) -> list[set[Key]]:
        """Takes what all hosts have told, for both tiers.

        Returns:
          The keys of the steps that each host has and that no host knows to be abandoned.
        """
        parsed = [json.loads(told) for told in sent]
        self._reported |= {(step, at) for _, abandoned in parsed for step, at in abandoned}
        return [{(step, at) for step, at in present} - self._reported for present, _ in parsed]

    def _abandoned_keys(self, found: Sequence[CommittedStep]) -> set[Key]:
        keys = self._reported | self._recorded_in(found)
        return keys | (set() if self._other_tier is None else self._other_tier._recorded())

    def _recorded(self) -> set[Key]:
        return self._recorded_in(self._found())

    def _recorded_in(self, steps: Sequence[CommittedStep]) -> set[Key]:
        """The steps, of either tier, that the summaries of these steps say are abandoned."""
        # Only the latest commit can name steps that are still in place: whoever writes next first
        # finishes setting them aside. Clocks of several hosts do not quite say which it is.
        in_order = sorted(steps, key=lambda s: (s.has_lost_record, s.commit_timestamp_nsecs))
        # One that cannot say when it was committed may be the latest.
        latest = in_order[-_LATEST - sum(s.has_lost_record for s in steps) :]
        keys: set[Key] = set()
        with storage_errors.translated("read", self._path):
            summaries = self._summaries.read(latest)
        for step, summary in zip(latest, summaries, strict=True):
            if summary is not None:
                keys |= from_summary(summary)
            elif step.is_incoming:  # it has abandoned something, though it cannot say what
                keys |= {s.key for s in steps if _may_replace(step, s)}
        return keys


def _may_replace(incoming: CommittedStep, step: CommittedStep) -> bool:
    is_older = step.commit_timestamp_nsecs < incoming.commit_timestamp_nsecs
    return is_older and step.step >= incoming.step
