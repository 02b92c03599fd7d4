"""Applies the preservation policy of a tier: after a save, and as a forecast before it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torchax_ckpt.policies.preservation import CheckpointInfo, preserved
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory


class Preserving:
    """Knows which steps of a tier the preservation policy keeps; used by process 0 only.

    Args:
      directory: the directory of the steps.
      policy: the preservation policy.
      is_per_host: whether each host has a directory of its own.
    """

    def __init__(self, directory: RunDirectory, policy: Any, *, is_per_host: bool) -> None:
        self._directory = directory
        self._policy = policy
        self._is_per_host = is_per_host

    def kept(self, steps: Sequence[CommittedStep]) -> list[bool]:
        """Returns for each step, oldest first, whether it is kept.

        Raises:
          PolicyError: see ``preserved``.
        """
        return preserved(self._policy, [*map(self._directory.info, steps)], self._damaged(steps))

    def neighbour(
        self, steps: Sequence[CommittedStep], step: int, metrics: Mapping[str, Any]
    ) -> Key | None:
        """Returns the newest of some steps that will be kept once another step is saved.

        If none will be, or the policy raises an error, the result is the newest of the steps, which
        exists until the other step is durable; None without steps.

        Args:
          steps: the steps of the run, oldest first.
          step, metrics: of the step to be saved.
        """
        if len(steps) < 2:
            return steps[-1].key if steps else None
        new = CheckpointInfo(
            step,
            self._directory.path / str(step),
            metadata=None,
            commit_timestamp_nsecs=time.time_ns(),
            metrics=dict(metrics),
        )
        infos = [*map(self._directory.info, steps), new]
        try:
            keep = preserved(self._policy, infos, [*self._damaged(steps), False])
        except Exception:  # the next call of ``kept`` raises it
            return steps[-1].key
        left = [committed for committed, kept in zip(steps, keep, strict=False) if kept]
        return (left or steps)[-1].key

    def _damaged(self, steps: Sequence[CommittedStep]) -> list[bool]:
        # Each host must keep the parts of the same steps, so damage that only one host knows of
        # does not count.
        verified = self._directory.verified
        return [not self._is_per_host and verified.is_damaged(s) for s in steps]
