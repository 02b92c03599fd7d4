"""Keeps in memory which steps belong to a run's branch and which steps the run abandons.

Process 0 lists the directory for all processes. After that, ``RunHistory`` changes its data in
memory whenever this run saves, renames or deletes a step. It lists the directory again when the run
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
from torchax_ckpt.storage.directory.run_directory import RunDirectory, checkpoint_info

logger = logging.getLogger(__name__)


class RunHistory:
    """Tracks the steps of one run in one tier: its durable directory, or its local directory."""

    def __init__(
        self, directory: RunDirectory, processes: Processes, durable: RunHistory | None = None
    ) -> None:
        self._directory = directory
        self._processes = processes
        self.path = directory.path
        self._other_tier = durable
        # A save to one tier may end while the training thread begins one to the other.
        self._changing = threading.RLock()
        self._fate = "deleted once a new step is durable"  # of steps of an abandoned branch
        if durable is None:
            self._fate = (
                "set aside once a new step is durable, and stay on storage until `torchax-ckpt "
                f"prune {self.path} --abandoned --delete` deletes them"
            )
        else:
            durable._other_tier, self._changing = self, durable._changing
        # The steps that this run builds on, and the abandoned steps, which are set aside once a new
        # step is committed here. Replaced as a whole, never changed in place.
        self.branches = Branches()
        self._in_flight: policies.CheckpointInfo | None = None
        self._committed: CommittedStep | None = None
        # The steps as policies see them, in ascending order. Replaced as a whole too: training
        # reads it at every step while the save's thread adds to it.
        self._checkpoints: tuple[policies.CheckpointInfo, ...] = ()
        # Numbers of steps that will be abandoned by the next save, and have not been logged yet.
        self._leaving: list[int] = []
        self._is_open = False

    def open(self) -> None:
        """Lists the directory, unless this object has listed it before."""
        if not self._is_open:
            with self._processes.round("looking for steps"):
                found = self._processes.first(lambda: self._directory.branches().described())
            self._replace(Branches.named(found, self.path))
            self._is_open = True

    def found(
        self, find: Callable[[], Sequence[CommittedStep]], what: str = "looking for steps"
    ) -> list[CommittedStep]:
        """Calls ``find`` on process 0 only; returns the steps that it finds on every process."""
        with self._processes.round(what):
            found = self._processes.first(lambda: committed_step.described(find()))
        return committed_step.named(found, self.path)

    def unknown(self, step: int | None = None) -> list[CommittedStep]:
        """Returns steps of other programs, from ``step`` on or newer than the run's own."""
        if not self._is_open:
            return []
        known = {s.key for s in self.branches.in_place}
        # The first save waits for this listing, and there may be thousands of old steps.
        if step is not None:
            found = self._directory.found(first=step)
        else:
            known_here = {s.key for s in self.branches.committed}
            present = self._directory.steps()
            newest = max((s.step for s in present if s.key in known_here), default=-1)
            found = [s for s in present if s.step > newest]
        return sorted((s for s in found if s.key not in known), key=lambda s: s.key)

    def go_on_from(self, step: int | None) -> None:
        """Lists the directory again; marks steps newer than ``step`` (None: all) as abandoned."""
        self._is_open = False
        self._leaving = []
        self._directory.failed.clear()  # the run may continue from one of them
        self.open()
        self._go_back(step)

    def keep_only(self, keys: set[Key]) -> None:
        """Marks as incomplete each step whose key is not in ``keys``, those that all hosts have."""
        with self._changing:
            missing = [s for s in self.branches.committed if s.key not in keys]
            self._replace(self.branches.leaving(incomplete=missing))

    def begin(self, step: int) -> None:
        """Begins a save of ``step``; newer steps in both tiers of the run become abandoned."""
        for history in (self, self._other_tier):
            if history is not None:
                history.open()
                history._go_back(step)
                history._warn_of_leaving()
        with self._changing:
            self._in_flight = checkpoint_info(CommittedStep(step, self.path, time.time_ns()))
            self._checkpoints = (*self._checkpoints, self._in_flight)

    def abandons(self) -> list[list[int]]:
        """Returns [number, commit time] of each abandoned step of both tiers, for a summary."""
        tiers = (self,) if self._other_tier is None else (self, self._other_tier)
        return [list(s.key) for history in tiers for s in history.branches.abandoned]

    def committed(self, committed: CommittedStep) -> None:
        """Records that the step of the current save, which can still fail, is committed."""
        self._committed = committed

    def end(self, durable: CommittedStep | None, summary: Mapping[str, Any] | None = None) -> None:
        """Ends the save, with the durable step; without, a step that it committed is abandoned."""
        with self._changing:
            save, self._in_flight = self._in_flight, None
            committed, self._committed = self._committed, None
            if durable is not None:
                self._directory.record_saved(durable, summary or {})
                committed_steps = (*self.branches.committed, durable)
                self.branches = dataclasses.replace(self.branches, committed=committed_steps)
                self._checkpoints = (*self._checkpoints[:-1], checkpoint_info(durable))
                return
            if save is not None:
                self._checkpoints = self._checkpoints[:-1]
            if committed is not None:
                self._directory.failed.add(committed.key)
                self.branches = self.branches.leaving((committed,))
            elif save is not None:
                self._directory.leave_out(save.step, self.branches.in_place)

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
        for checkpoint in reversed(self._checkpoints):
            if checkpoint.step <= step:
                return checkpoint.step == step
        return False

    def checkpoints(self) -> Sequence[policies.CheckpointInfo]:
        """Returns the branch's steps for policies, oldest first; a step being saved comes last."""
        return self._checkpoints

    def _replace(self, branches: Branches) -> None:
        """Replaces ``branches``, and derives from them the checkpoints that policies see."""
        self.branches = branches
        in_flight = () if self._in_flight is None else (self._in_flight,)
        self._checkpoints = (*map(checkpoint_info, self.branches.committed), *in_flight)

    def _go_back(self, step: int | None) -> None:
        with self._changing:
            if newer := self.branches.newer_than(step):
                self._leaving += [s.step for s in newer]
                self._replace(self.branches.leaving(newer))

    def _warn_of_leaving(self) -> None:
        # At a save, because only a save abandons them: a restore may come first, or no save at all.
        if self._leaving:
            logger.warning(
                "%s: steps %s are not on the branch that this run continues; they will be %s",
                self._directory.path,
                self._leaving,
                self._fate,
                extra=fields(path=self._directory.path, steps=self._leaving),
            )
            self._leaving = []
