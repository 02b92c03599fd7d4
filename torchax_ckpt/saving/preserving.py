"""Applies the preservation policy of a tier: after a save, and as a forecast before it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.policies import preservation
from torchax_ckpt.policies.preservation import preserved
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.saving.run_history import checkpoint_info, checkpoint_infos
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory

logger = logging.getLogger(__name__)

# After so many saves in a row without a ranked metric, warns: before, an evaluation may come.
_MANY_SAVES = 100


class Preserving:
    """Decides, on process 0, which steps of a tier are kept.

    A durable tier keeps its newest verified step besides those that the policy keeps. ``holds``
    returns whether a step must stay for now, because it is being copied.
    """

    def __init__(
        self,
        directory: RunDirectory,
        policy: Any,
        options: CheckpointOptions,
        processes: Processes,
        *,
        is_local: bool,
        holds: Callable[[CommittedStep], bool],
    ) -> None:
        self._directory = directory
        self.policy = policy
        self._reads_back = options.read_back
        self.is_local = is_local
        self._is_per_host = processes.is_per_host
        self._is_first = processes.is_first
        self._problem = ""  # if no step has a metric that a best-N rule ranks
        self._num_saves_without = 0
        self._has_warned = False
        self._holds = holds

    def warn_of_sharing(self) -> None:
        """Warns if one damaged file, which many steps share, could leave no step."""
        if self._reads_back or self.is_local or not self._is_first:
            return
        if preservation.keeps_one(self.policy):
            logger.warning(
                "%s: the preservation policy keeps one step, and saves reuse files of earlier "
                "steps unread: one damaged file can leave no step to resume from. "
                "Keep two steps, LatestN(2), or give CheckpointOptions(read_back=True) or "
                "CheckpointOptions(reuse=False)",
                self._directory.path,
            )

    def kept(self, steps: Sequence[CommittedStep]) -> list[bool]:
        """Returns for each step, oldest first, whether it is kept; raises as ``preserved`` does."""
        infos = checkpoint_infos(self._directory, steps)
        rules, metrics = preservation.best_rules(self.policy), [i.metrics or {} for i in infos]
        self._problem, is_misspelled = preservation.why_unranked(rules, metrics)
        self._num_saves_without = self._num_saves_without + 1 if self._problem else 0
        if is_misspelled or self._num_saves_without == _MANY_SAVES:
            self.warn_of_metrics()
        kept = self._spared(steps, preserved(self.policy, infos, self._damaged(steps)))
        return [keep or self._holds(step) for keep, step in zip(kept, steps, strict=True)]

    def warn_of_metrics(self) -> None:
        """Warns, once, if no step has a metric that a best-N rule ranks."""
        if self._problem and not self._has_warned:
            self._has_warned = True
            logger.warning("%s: %s", self._directory.path, self._problem)

    def kept_before(
        self, steps: Sequence[CommittedStep], step: int, metrics: Mapping[str, Any]
    ) -> CommittedStep | None:
        """Returns the newest of some steps that will be kept once ``step`` is saved, else the last.

        The last exists at least until ``step`` is durable.
        """
        if len(steps) < 2:
            return steps[-1] if steps else None
        new = CommittedStep(step, self._directory.path / str(step), time.time_ns())
        try:
            known = checkpoint_infos(self._directory, steps)
            infos = [*known, checkpoint_info(new, dict(metrics))]
            keep = preserved(self.policy, infos, [*self._damaged(steps), False])[:-1]
            # If it is read back, the new step will be the newest verified one.
            keep = keep if self._reads_back else self._spared(steps, keep)
        except Exception as error:  # the next call of ``kept`` raises it
            logger.debug("which steps will be kept is not known: %s", error)
            return steps[-1]
        left = [committed for committed, is_kept in zip(steps, keep, strict=True) if is_kept]
        return (left or steps)[-1]

    def _spared(self, steps: Sequence[CommittedStep], keep: Sequence[bool]) -> list[bool]:
        """Returns ``keep``, changed so that the newest verified step of a durable tier is kept."""
        if self.is_local:  # it has no room for another step
            return [*keep]
        return self._directory.verified.sparing_newest(keep, steps)

    def _damaged(self, steps: Sequence[CommittedStep]) -> list[bool]:
        # Each host must keep the parts of the same steps, so damage that only one host knows of
        # does not count.
        verified = self._directory.verified
        return [not self._is_per_host and verified.is_damaged(s) for s in steps]
