"""The steps of a run in one tier, as this program knows them: its branch, and abandoned steps.

Process 0 lists the directory for all processes. After that, ``RunHistory`` changes what it knows
whenever this run saves, renames or deletes a step. It lists the directory again when the run
continues from another step. ``abandonment.py`` decides which steps are abandoned.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torchax_ckpt import policies
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.runtime.user_messages import fields
from torchax_ckpt.storage.directory import committed_step
from torchax_ckpt.storage.directory.abandonment import Branches, Key
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.lineage import Start
from torchax_ckpt.storage.directory.run_directory import RunDirectory

logger = logging.getLogger(__name__)


def checkpoint_info(
    committed: CommittedStep, metrics: dict[str, Any] | None = None
) -> policies.CheckpointInfo:
    """Returns a step as policies see it."""
    return policies.CheckpointInfo(
        committed.step,
        committed.path,
        metadata=None,
        commit_timestamp_nsecs=committed.commit_timestamp_nsecs,
        metrics=metrics,
    )


def checkpoint_infos(
    directory: RunDirectory, steps: Iterable[CommittedStep]
) -> list[policies.CheckpointInfo]:
    """Returns steps with their metrics as policies see them."""
    return [checkpoint_info(committed, directory.metrics(committed)) for committed in steps]


@dataclasses.dataclass(frozen=True)
class _Known:
    """The steps of one tier, which a listing found or this run saved."""

    is_listed: bool = False  # whether this program has listed the directory, for this branch
    branches: Branches = dataclasses.field(default_factory=Branches)
    # The steps of the branch as policies see them, oldest first. While a save is in flight, its
    # step is the last one.
    checkpoints: tuple[policies.CheckpointInfo, ...] = ()
    is_saving: bool = False
    # The numbers of steps that the next save abandons, until it has logged them.
    leaving: tuple[int, ...] = ()

    def with_branches(self, branches: Branches) -> _Known:
        in_flight = self.checkpoints[-1:] if self.is_saving else ()
        checkpoints = (*map(checkpoint_info, branches.committed), *in_flight)
        return dataclasses.replace(self, branches=branches, checkpoints=checkpoints)

    def without_save(self) -> _Known:
        left = self.checkpoints[:-1] if self.is_saving else self.checkpoints
        return dataclasses.replace(self, checkpoints=left, is_saving=False)


class RunHistory:
    """Tracks the steps of a run in one tier; ``of_run`` has the histories of all its tiers."""

    def __init__(
        self, directory: RunDirectory, processes: Processes, of_run: list[RunHistory] | None = None
    ) -> None:
        self._directory = directory
        self._processes = processes
        self.path = directory.path
        self._of_run = [] if of_run is None else of_run
        self._of_run.append(self)
        # A save to one tier may end while the training thread begins one to the other.
        self._changing = threading.RLock()
        # What led to the run's next steps, which they record: see ``lineage.py``.
        self.start = Start()
        # Replaced as a whole: the training reads it at each step while a save's thread changes it.
        self._known = _Known()

    @property
    def branches(self) -> Branches:
        """The steps that this run builds on, and those to set aside once a new step is durable."""
        return self._known.branches

    def on_storage(self) -> list[CommittedStep]:
        """Returns the steps that count on storage: the branch, and those that a save will leave."""
        known, is_damaged = self._known, self._directory.verified.is_damaged
        leaving = [s for s in known.branches.abandoned if s.step in known.leaving]
        steps = (*known.branches.committed, *(s for s in leaving if not is_damaged(s)))
        return sorted(steps, key=lambda s: s.step)

    def open(self) -> None:
        """Lists the directory, unless this object has listed it before."""
        if not self._known.is_listed:
            with self._processes.round("looking for steps"):
                found = self._processes.first(lambda: self._directory.branches().to_json())
            with self._changing:
                self._replace(Branches.from_json(found, self.path))
                self._known = dataclasses.replace(self._known, is_listed=True)

    def found(
        self, find: Callable[[], Sequence[CommittedStep]], what: str = "looking for steps"
    ) -> list[CommittedStep]:
        """Returns the steps that ``find``, called on process 0 only, has found there."""
        with self._processes.round(what):
            found = self._processes.first(lambda: committed_step.to_json(find()))
        return committed_step.from_json(found, self.path)

    def unknown(self, step: int | None = None) -> list[CommittedStep]:
        """Returns steps of other programs, from ``step`` on or newer than the run's own."""
        if not self._known.is_listed:
            return []
        known = {s.key for s in self.branches.in_place}
        # The first save waits for this listing, and there may be thousands of old steps.
        if step is not None:
            found = self._directory.all_committed(first=step)
        else:
            known_here = {s.key for s in self.branches.committed}
            present = self._directory.steps()
            newest = max((s.step for s in present if s.key in known_here), default=-1)
            found = [s for s in present if s.step > newest]
        return sorted((s for s in found if s.key not in known), key=lambda s: s.key)

    def go_on_from(self, step: int | None) -> None:
        """Lists the directory again; marks steps newer than ``step`` (None: all) as abandoned."""
        self._known = dataclasses.replace(self._known, is_listed=False, leaving=())
        self._directory.failed.clear()  # the run may continue from one of them
        self.open()
        self._go_back(step)

    @property
    def leaving(self) -> tuple[int, ...]:
        """The numbers of the steps that the next save abandons, until it has logged them."""
        return self._known.leaving

    def keep_only(self, keys: set[Key]) -> None:
        """Marks as incomplete the steps that some host lacks; all hosts have those of ``keys``."""
        with self._changing:
            missing = [s for s in self.branches.committed if s.key not in keys]
            self._replace(self.branches.leaving(incomplete=missing))

    def begin(self, step: int) -> None:
        """Begins a save of ``step``; newer steps in all tiers of the run become abandoned."""
        for history in self._of_run:
            history.open()
            history._go_back(step)
            history._warn_of_leaving()
        with self._changing:
            info = checkpoint_info(CommittedStep(step, self.path, time.time_ns()))
            known = self._known
            checkpoints = (*known.checkpoints, info)
            self._known = dataclasses.replace(known, checkpoints=checkpoints, is_saving=True)

    def abandons(self) -> list[list[int]]:
        """Returns [number, commit time] of each step that the run leaves, here and in a mirror."""
        tiers = sorted(self._of_run, key=lambda history: history is not self)
        here = [s.key for history in tiers for s in history.branches.abandoned]
        return [list(key) for key in dict.fromkeys([*here, *self.start.left])]

    def succeed(self, durable: CommittedStep, summary: Mapping[str, Any]) -> None:
        """Ends a save that has succeeded on all processes."""
        with self._changing:
            self._directory.record_saved(durable, summary)
            known = self._known.without_save()
            branches = dataclasses.replace(
                known.branches, committed=(*known.branches.committed, durable)
            )
            checkpoints = (*known.checkpoints, checkpoint_info(durable))
            self._known = dataclasses.replace(known, branches=branches, checkpoints=checkpoints)

    def fail(self, step: int, committed: CommittedStep | None) -> None:
        """Ends a save that has failed; a step that it ``committed`` nevertheless is abandoned."""
        with self._changing:
            known, self._known = self._known, self._known.without_save()
            if committed is not None:
                self._directory.failed.add(committed.key)
                self._replace(self.branches.leaving((committed,)))
            elif known.is_saving:  # a request without an answer may still commit it
                self._directory.leave_out(step, self.branches.in_place)

    def refresh(self, steps: Iterable[CommittedStep]) -> None:
        """Takes the steps' new paths from ``steps``; forgets each step that is not in ``steps``."""
        with self._changing:
            before, branches = self.branches, self.branches.moved(steps)
            self._replace(branches)
        left = {s.key for s in branches.in_place}
        for gone in (s for s in before.in_place if s.key not in left):
            self._directory.forget(gone)  # only process 0 has deleted it

    def has(self, step: int) -> bool:
        """Returns whether the run's branch has a step of this number, committed or being saved."""
        for checkpoint in reversed(self.checkpoints()):
            if checkpoint.step <= step:
                return checkpoint.step == step
        return False

    def checkpoints(self) -> Sequence[policies.CheckpointInfo]:
        """Returns the branch's steps for policies, oldest first; a step being saved comes last."""
        return self._known.checkpoints

    def _replace(self, branches: Branches) -> None:
        self._known = self._known.with_branches(branches)

    def _go_back(self, step: int | None) -> None:
        with self._changing:
            if newer := self.branches.newer_than(step):
                self._replace(self.branches.leaving(newer))
                leaving = (*self._known.leaving, *(s.step for s in newer))
                self._known = dataclasses.replace(self._known, leaving=leaving)

    def _warn_of_leaving(self) -> None:
        # At a save, because only a save abandons them: a restore may come first, or no save at all.
        with self._changing:
            known, self._known = self._known, dataclasses.replace(self._known, leaving=())
        if known.leaving:
            fate = "deleted once a new step is durable"
            if self is self._of_run[0]:  # the durable tier's
                fate = (
                    "set aside once a new step is durable, and stay on storage until "
                    f"`torchax-ckpt prune {self.path} --abandoned --delete` deletes them"
                )
            logger.warning(
                "%s: steps %s are not on the branch that this run continues; they will be %s",
                self.path,
                list(known.leaving),
                fate,
                extra=fields(path=self.path, steps=list(known.leaving)),
            )
