"""Decides which steps of a run are abandoned; no other module makes this decision.

A run that goes back to an earlier step abandons the newer steps; a run that starts anew abandons
all. The others count: they are the run's branch. Abandoned steps keep their names until a new step
is durable. Then the run sets them aside: it renames them, or deletes them from a local tier; it
also deletes a step whose save failed after its commit. If the run ends before, they still count
when it is started again. A step that cannot be renamed stays, and every later step lists it.

In memory, the ``Branches`` of each tier (``run_history.py``) hold as abandoned the steps that are
newer than the step from which the run continues, or than the step that a save begins to write, in
both tiers; and a step whose save failed after its commit. A step in a local tier that some host
lacks is incomplete instead: a later start may need it, so no summary lists it, until a new step is
on all hosts.

On storage, the summary of the next step lists the abandoned steps of both tiers that were not set
aside yet. Its field ``abandons`` has their keys: number and commit time, since a later branch may
use the number again. A process that lists a directory later treats as abandoned:

    - the steps in the summaries of the 32 latest commits there, and of those in the other tier;
    - the steps that other hosts report (each host reads its own local tier only);
    - if the summary of an incoming step (see ``run_directory.py``) is damaged, all steps that were
      committed before it and whose number is at least its own.

If several steps of one number are not abandoned, only one counts: the incoming step that was
committed last or, without incoming steps, the step that was committed last.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from etils import epath

from torchax_ckpt.storage.directory import committed_step
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.step_files import Summaries
from torchax_ckpt.storage.medium import storage_errors

Key: TypeAlias = tuple[int, int]

# The field of a step's summary that lists the steps it abandons, as [number, commit time].
SUMMARY_FIELD = "abandons"
# How many summaries are read: those of the latest commits by commit time. Hosts' clocks differ, so
# any of these may be the summary of the commit that is really the latest.
_LATEST = 32


@dataclasses.dataclass(frozen=True)
class Branches:
    """The committed steps of a directory, divided into the run's branch and abandoned steps."""

    committed: tuple[CommittedStep, ...] = ()  # those that count, oldest first, one a number
    abandoned: tuple[CommittedStep, ...] = ()  # those that do not count and were not set aside yet
    # The steps of a local tier that some host lacks. A listing cannot find them: the training
    # threads find them by comparing what their hosts have.
    incomplete: tuple[CommittedStep, ...] = ()

    @classmethod
    def divided(cls, steps: Sequence[CommittedStep], abandoned: set[Key]) -> Branches:
        """Divides the steps ``found`` into steps that count and abandoned steps."""
        in_order = sorted(steps, key=lambda s: (s.is_incoming, s.commit_timestamp_nsecs))
        counted = {s.step: s for s in in_order if s.key not in abandoned}
        return cls(
            tuple(counted[step] for step in sorted(counted)),
            tuple(s for s in steps if counted.get(s.step) is not s),
        )

    @property
    def in_place(self) -> tuple[CommittedStep, ...]:
        """All steps that were not set aside; a new step's summary lists the abandoned ones."""
        return (*self.committed, *self.unwanted)

    @property
    def unwanted(self) -> tuple[CommittedStep, ...]:
        """The steps to set aside once a new step is durable: abandoned and incomplete ones."""
        return (*self.abandoned, *self.incomplete)

    def newer_than(self, step: int | None) -> list[CommittedStep]:
        """Returns the steps that a run abandons if it continues from ``step`` (None: the start)."""
        first = -1 if step is None else step
        after = bisect.bisect_right(self.committed, first, key=lambda s: s.step)
        return [*self.committed[after:], *(s for s in self.incomplete if s.step > first)]

    def leaving(
        self, abandoned: Sequence[CommittedStep] = (), incomplete: Sequence[CommittedStep] = ()
    ) -> Branches:
        """Returns new branches in which these steps, perhaps of a failed save, do not count."""
        keys = {s.key for s in (*abandoned, *incomplete)}
        committed, lacking = (
            [s for s in steps if s.key not in keys] for steps in (self.committed, self.incomplete)
        )
        return Branches(tuple(committed), (*self.abandoned, *abandoned), (*lacking, *incomplete))

    def moved(self, now: Iterable[CommittedStep]) -> Branches:
        """Returns new branches of the steps that exist ``now``, with their present paths."""
        now_at = {s.key: s for s in now}
        lists = (self.committed, self.abandoned, self.incomplete)
        return Branches(*(tuple(now_at[s.key] for s in each if s.key in now_at) for each in lists))

    def to_json(self) -> list[Any]:
        """Returns the branches as JSON, to send to other processes of the run."""
        return [committed_step.to_json(steps) for steps in (self.committed, self.abandoned)]

    @classmethod
    def from_json(cls, raw: Iterable[Any], directory: epath.Path) -> Branches:
        """Rebuilds branches from the JSON that ``to_json`` made in any process."""
        committed, abandoned = (tuple(committed_step.from_json(s, directory)) for s in raw)
        return cls(committed, abandoned)


def from_summary(summary: Mapping[str, Any]) -> set[Key]:
    """Returns the keys of abandoned steps that a summary lists; skips malformed entries."""
    entries = summary.get(SUMMARY_FIELD)
    return {
        (entry[0], entry[1])
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, list) and [type(part) for part in entry] == [int, int]
    }


class Abandonment:
    """Finds the abandoned steps of one directory; ``durable`` is given for a local tier."""

    def __init__(
        self,
        path: epath.Path,
        list_all: Callable[[], list[CommittedStep]],
        summaries: Summaries,
        durable: Abandonment | None = None,
    ) -> None:
        self._path = path
        self._list_all = list_all  # returns the directory's steps, abandoned ones included
        self._summaries = summaries
        self._is_local = durable is not None
        self._other_tier = durable
        # Keys that other hosts report as abandoned, of both tiers.
        self._reported: set[Key] = set()
        if durable is not None:
            self._reported = durable._reported
            durable._other_tier = self

    def branches(self) -> Branches:
        """Lists the directory; divides its steps into steps that count and abandoned steps."""
        steps = self._list_all()
        return Branches.divided(steps, self._abandoned_keys(steps) if steps else set())

    def certain_among(self, steps: Sequence[CommittedStep]) -> list[CommittedStep]:
        """Returns the abandoned steps that may be set aside before the next save."""
        # The summaries of a local tier may be lost with its host, and the run may then have to
        # continue from a durable step that only they list.
        keys = self._abandoned_keys(steps) if self._is_local else self._recorded_in(steps)
        return [s for s in steps if s.key in keys]

    def keys(self) -> set[Key]:
        """Returns the keys of all abandoned steps that are known here, of whatever place."""
        return self._abandoned_keys(self._list_all())

    def listed_by_newest(self) -> list[CommittedStep]:
        """Returns the abandoned steps in place that the summary of the newest step lists.

        If a commit time is lost, it is not known which step is the newest, and none is returned.
        """
        branches = self.branches()
        if not branches.committed or any(s.has_lost_record for s in branches.committed):
            return []
        newest = max(branches.committed, key=lambda s: s.commit_timestamp_nsecs)
        with storage_errors.translated("read", self._path):
            summary = self._summaries.of(newest)
        keys = from_summary(summary or {})
        return [s for s in branches.abandoned if s.key in keys and not s.has_lost_record]

    def report(self, steps: Iterable[CommittedStep]) -> bytes:
        """Returns a JSON report for other hosts: the keys of ``steps``, and of abandoned steps."""
        return json.dumps([[s.key for s in steps], sorted(self._recorded())]).encode()

    @staticmethod
    def joined(reports: Iterable[bytes]) -> bytes:
        """Joins hosts' reports: keys of abandoned steps, of those on all hosts, and on any."""
        present, abandoned = zip(*map(json.loads, reports), strict=True)
        keys = [{tuple(key) for key in of_host} for of_host in present]
        abandoned_keys = {tuple(key) for of_host in abandoned for key in of_host}
        lists = abandoned_keys, set.intersection(*keys), set.union(*keys)
        return json.dumps([sorted(each) for each in lists]).encode()

    def record(self, joined: bytes) -> tuple[set[Key], set[Key]]:
        """Records the abandoned steps of all hosts; returns the others on all hosts, and on any."""
        abandoned, on_all, on_any = (
            {(step, at) for step, at in keys} for keys in json.loads(joined)
        )
        self._reported |= abandoned
        return on_all - self._reported, on_any - self._reported

    def _abandoned_keys(self, steps: Sequence[CommittedStep]) -> set[Key]:
        keys = self._reported | self._recorded_in(steps)
        return keys | (set() if self._other_tier is None else self._other_tier._recorded())

    def _recorded(self) -> set[Key]:
        return self._recorded_in(self._list_all())

    def _recorded_in(self, steps: Sequence[CommittedStep]) -> set[Key]:
        """Returns the keys of the abandoned steps that the summaries of ``steps`` list."""
        # The latest commit lists all abandoned steps that are still in place, because each writer
        # first sets aside what it can, and lists what it cannot. The clocks of several hosts may
        # order the last commits wrongly, so several summaries are read.
        in_order = sorted(steps, key=lambda s: (s.has_lost_record, s.commit_timestamp_nsecs))
        # A step whose commit time is lost may be the latest one.
        latest = in_order[-_LATEST - sum(s.has_lost_record for s in steps) :]
        keys: set[Key] = set()
        with storage_errors.translated("read", self._path):
            summaries = self._summaries.read(latest)
        for step, summary in zip(latest, summaries, strict=True):
            if summary is not None:
                keys |= from_summary(summary)
            elif step.is_incoming:  # its summary is damaged, and listed at least one step
                at = step.commit_timestamp_nsecs
                older = (s for s in steps if s.commit_timestamp_nsecs < at)
                keys |= {s.key for s in older if s.step >= step.step}
        return keys
