"""Owns what a run knows of its directory: the steps it goes on from, and those it abandons.

The directory is listed once, by process 0 for all; after that the one writer knows itself what
comes and goes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torchax_ckpt.policies import CheckpointInfo
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.storage.directory import committed_step
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import StepDirectory

logger = logging.getLogger(__name__)


class History:
    """The steps of one run.

    Args:
      directory: where they are.
      processes: those of the run, as its training threads speak to them.
      durable: the history of the durable tier, if this is that of the local tier before it.

    Attributes:
      path: of the directory.
      committed: the steps this run builds on, oldest first.
      abandoned: newer steps of a branch this run left; set aside once a new step is committed here.
    """

    def __init__(
        self, directory: StepDirectory, processes: Processes, durable: History | None = None
    ) -> None:
        self._directory = directory
        self._processes = processes
        self.path = directory.path
        self._other = durable
        if durable is not None:
            durable._other = self
        self.committed: list[CommittedStep] = []
        self.abandoned: list[CommittedStep] = []
        self._in_flight: CheckpointInfo | None = None
        self._landed: CommittedStep | None = None
        # Ascending. Replaced as a whole, never changed: it is asked for at every step of the
        # training, while the save's thread adds to it.
        self._checkpoints: tuple[CheckpointInfo, ...] = ()
        self._is_open = False

    def open(self) -> None:
        """Lists the directory, if that has not been done yet."""
        if not self._is_open:
            self.committed = self.found(self._directory.steps)
            self.abandoned = list(self._directory.left_in_place)
            self._look()
            self._is_open = True

    def found(self, find: Callable[[], Sequence[CommittedStep]]) -> list[CommittedStep]:
        """What process 0 finds in the directory now, on all processes."""
        with self._processes.round("looking for steps"):
            found = self._processes.first(lambda: committed_step.described(find()))
        return committed_step.named(found, self.path)

    def unknown(self, step: int | None = None) -> list[CommittedStep]:
        """Steps that others have saved since the directory was listed; for process 0.

        Args:
          step: only this one and newer ones; default: newer than what this run goes on from.
        """
        if not self._is_open:
            return []
        known = {s.key for s in (*self.committed, *self.abandoned)}
        if step is not None:  # the first save waits for this: of old steps there may be thousands
            found = self._directory.found(first=step)
        else:
            own = {s.key for s in self.committed}
            there = self._directory.steps()
            newest = max((s.step for s in there if s.key in own), default=-1)
            found = [s for s in there if s.step > newest]
        return sorted((s for s in found if s.key not in known), key=lambda s: s.key)

    def go_on_from(self, step: int | None) -> None:
        """The run goes on from this step (None: from the start); newer ones are abandoned."""
        self._is_open = False
        self.open()
        self._abandon(s for s in self.committed if step is None or s.step > step)

    def keep_only(self, keys: set[tuple[int, int]]) -> None:
        """Leaves out steps that not all hosts have; they are removed after the next save."""
        left_out = [s for s in self.committed if s.key not in keys]
        self.committed = [s for s in self.committed if s.key in keys]
        self.abandoned += left_out
        self._look()

    def begin(self, step: int) -> None:
        """A save of this step begins; whatever is newer, in either tier, is of another branch."""
        for history in (self, self._other):
            if history is not None:
                history.open()
                if history.committed and history.committed[-1].step > step:
                    history._abandon(s for s in history.committed if s.step > step)
        now = time.time_ns()
        self._in_flight = CheckpointInfo(
            step, self._directory.path, metadata=None, commit_timestamp_nsecs=now
        )
        self._checkpoints = (*self._checkpoints, self._in_flight)

    def abandons(self) -> list[list[int]]:
        """What a step saved now abandons, in both tiers: steps and their commit times."""
        known = [*self.abandoned, *(self._other.abandoned if self._other else ())]
        return [list(s.key) for s in known]

    def landed(self, committed: CommittedStep) -> None:
        """The step in flight can be read from now on, however its save ends."""
        self._landed = committed

    def end(self, durable: CommittedStep | None, summary: Mapping[str, Any] | None = None) -> None:
        """The save has ended: with a durable step, or without.

        Without, what it may have left is as good as any until the next step is durable.
        """
        self._in_flight = None
        landed, self._landed = self._landed, None
        if durable is None:
            self._checkpoints = self._checkpoints[:-1]
            self.abandoned += [] if landed is None else [landed]
        else:
            self._directory.know_summary(durable, summary or {})
            self.committed.append(durable)
            self._checkpoints = (*self._checkpoints[:-1], _info(durable))

    def settle(self, settled: CommittedStep) -> None:
        """The newest step has moved to its own name."""
        self.committed[-1] = settled
        self._look()

    def refresh(self, steps: Iterable[CommittedStep]) -> None:
        """Takes where the steps lie now, after some were moved or deleted."""
        now_at = {s.key: s for s in steps}
        for known in (self.committed, self.abandoned):
            known[:] = [now_at[s.key] for s in known if s.key in now_at]
        self._look()

    def forget(self, steps: Iterable[int]) -> None:
        """Strikes deleted steps."""
        if gone := set(steps):
            self.committed = [s for s in self.committed if s.step not in gone]
            self.abandoned = [s for s in self.abandoned if s.step not in gone]
            self._look()

    def has(self, step: int) -> bool:
        """Whether this run has the step, or is saving it."""
        for checkpoint in reversed(self._checkpoints):
            if checkpoint.step <= step:
                return checkpoint.step == step
        return False

    def checkpoints(self) -> Sequence[CheckpointInfo]:
        """The steps as save decision policies see them, oldest first, the one in flight last."""
        return self._checkpoints

    def _look(self) -> None:
        """Takes a new look at all steps, after others than the newest have come or gone."""
        in_flight = () if self._in_flight is None else (self._in_flight,)
        self._checkpoints = (*map(_info, self.committed), *in_flight)

    def _abandon(self, steps: Iterable[CommittedStep]) -> None:
        abandoned = list(steps)
        if not abandoned:
            return
        logger.warning(
            "%s: steps %s belong to another branch than this run goes on from; they will be set "
            "aside once a new step is durable",
            self._directory.path,
            [s.step for s in abandoned],
        )
        self.abandoned += abandoned
        self.committed = [s for s in self.committed if s not in abandoned]
        self._look()


def _info(committed: CommittedStep) -> CheckpointInfo:
    return CheckpointInfo(
        committed.step,
        committed.path,
        metadata=None,
        commit_timestamp_nsecs=committed.commit_timestamp_nsecs,
    )
