"""What a run knows of its directory: the steps it goes on from, and those it abandons.

The directory is listed once, by process 0 for all; after that the one writer knows itself what
comes and goes. Which steps are abandoned is in ``abandonment.py``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torchax_ckpt.policies import CheckpointInfo
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.storage.directory import abandonment, committed_step
from torchax_ckpt.storage.directory.abandonment import Branches, Key
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory

logger = logging.getLogger(__name__)


class RunHistory:
    """The steps of one run.

    Args:
      directory: where they are.
      processes: those of the run, as its training threads speak to them.
      durable: the history of the durable tier, if this is that of the local tier before it.

    Attributes:
      path: of the directory.
      branches: the steps this run builds on, and those of branches it left, which are set aside
        once a new step is committed here. Replaced as a whole, never changed.
    """

    def __init__(
        self, directory: RunDirectory, processes: Processes, durable: RunHistory | None = None
    ) -> None:
        self._directory = directory
        self._processes = processes
        self.path = directory.path
        self._other_tier = durable
        if durable is not None:
            durable._other_tier = self
        self.branches = Branches()
        self._in_flight: CheckpointInfo | None = None
        self._landed: CommittedStep | None = None
        # Ascending. Replaced as a whole, never changed: it is asked for at every step of the
        # training, while the save's thread adds to it.
        self._checkpoints: tuple[CheckpointInfo, ...] = ()
        self._is_open = False

    def open(self) -> None:
        """Lists the directory, if that has not been done yet."""
        if not self._is_open:
            with self._processes.round("looking for steps"):
                found = self._processes.first(lambda: self._directory.branches().described())
            self._replace(Branches.named(found, self.path))
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
        known = {s.key for s in self.branches.in_place}
        if step is not None:  # the first save waits for this: of old steps there may be thousands
            found = self._directory.found(first=step)
        else:
            known_here = {s.key for s in self.branches.committed}
            present = self._directory.steps()
            newest = max((s.step for s in present if s.key in known_here), default=-1)
            found = [s for s in present if s.step > newest]
        return sorted((s for s in found if s.key not in known), key=lambda s: s.key)

    def go_on_from(self, step: int | None) -> None:
        """The run goes on from this step (None: from the start); newer ones are abandoned."""
        self._is_open = False
        self.open()
        self._go_back(step)

    def keep_only(self, keys: set[Key]) -> None:
        """Leaves out steps that not all hosts have; they are removed after the next save."""
        missing = (s for s in self.branches.committed if s.key not in keys)
        self._replace(self.branches.leaving(missing))

    def begin(self, step: int) -> None:
        """A save of this step begins; whatever is newer, in either tier, is of another branch."""
        for history in (self, self._other_tier):
            if history is not None:
                history.open()
                history._go_back(step)
        now = time.time_ns()
        self._in_flight = CheckpointInfo(
            step, self._directory.path, metadata=None, commit_timestamp_nsecs=now
        )
        self._checkpoints = (*self._checkpoints, self._in_flight)

    def abandons(self) -> list[list[int]]:
        """What a step saved now abandons, in both tiers: steps and their commit times."""
        tiers = (self,) if self._other_tier is None else (self, self._other_tier)
        return abandonment.to_summary(*(history.branches for history in tiers))

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
            self.branches = self.branches.leaving(() if landed is None else (landed,))
        else:
            self._directory.know_summary(durable, summary or {})
            self.branches = self.branches.with_newest(durable)
            self._checkpoints = (*self._checkpoints[:-1], _checkpoint_info(durable))

    def settle(self, settled: CommittedStep) -> None:
        """The newest step has moved to its own name."""
        self._replace(self.branches.moved((*self.branches.in_place, settled)))

    def clear_abandoned(self) -> None:
        """The abandoned steps were set aside."""
        self.branches = Branches(self.branches.committed)

    def refresh(self, steps: Iterable[CommittedStep]) -> None:
        """Takes where the steps lie now, after some were moved or deleted."""
        self._replace(self.branches.moved(steps))

    def forget(self, steps: Iterable[int]) -> None:
        """Strikes deleted steps."""
        if gone := set(steps):
            self.refresh(s for s in self.branches.in_place if s.step not in gone)

    def has(self, step: int) -> bool:
        """Whether this run has the step, or is saving it."""
        for checkpoint in reversed(self._checkpoints):
            if checkpoint.step <= step:
                return checkpoint.step == step
        return False

    def checkpoints(self) -> Sequence[CheckpointInfo]:
        """The steps as save decision policies see them, oldest first, the one in flight last."""
        return self._checkpoints

    def _replace(self, branches: Branches) -> None:
        """Replaces the steps, after others than the newest have come or gone."""
        self.branches = branches
        in_flight = () if self._in_flight is None else (self._in_flight,)
        self._checkpoints = (*map(_checkpoint_info, self.branches.committed), *in_flight)

    def _go_back(self, step: int | None) -> None:
        if not (newer := self.branches.newer_than(step)):
            return
        logger.warning(
            "%s: steps %s belong to another branch than this run goes on from; they will be set "
            "aside once a new step is durable",
            self._directory.path,
            [s.step for s in newer],
        )
        self._replace(self.branches.leaving(newer))


def _checkpoint_info(committed: CommittedStep) -> CheckpointInfo:
    return CheckpointInfo(
        committed.step,
        committed.path,
        metadata=None,
        commit_timestamp_nsecs=committed.commit_timestamp_nsecs,
    )
