"""The summaries of a directory's steps: small JSON with metrics and abandoned steps."""

from __future__ import annotations

import concurrent.futures
import types
from collections.abc import Mapping, Sequence
from typing import Any

from torchax_ckpt.storage.directory import committed_step
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.medium import containment, seals, storage_errors

# Stands for a missing or damaged summary.
_LOST: Mapping[str, Any] = types.MappingProxyType({})


class Summaries:
    """The summaries of a directory's steps. Reads each one once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Mapping[str, Any]] = {}

    def know(self, committed: CommittedStep, summary: Mapping[str, Any]) -> None:
        """Stores a summary that was just written, so that it need not be read."""
        self._known[committed.key] = summary

    def forget(self, committed: CommittedStep) -> None:
        """Drops the summary of a deleted step, because a run may have millions of steps."""
        self._known.pop(committed.key, None)

    def metrics(self, committed: CommittedStep) -> dict[str, Any]:
        """Returns the metrics saved with a step; {} if there are none."""
        metrics = self._of(committed).get("metrics")
        return dict(metrics) if isinstance(metrics, dict) else {}

    def read(self, steps: Sequence[CommittedStep]) -> list[Mapping[str, Any] | None]:
        """Returns the summary of each step; None for a missing or damaged one."""
        with concurrent.futures.ThreadPoolExecutor() as pool:  # each is a round trip to a bucket
            return [None if said is _LOST else said for said in pool.map(self._of, steps)]

    def _of(self, committed: CommittedStep) -> Mapping[str, Any]:
        found = self._known.get(committed.key)
        if found is None:
            try:
                containment.require_contained(committed.path, committed.step)
                loaded = seals.read_sealed(committed.path / committed_step.SUMMARY)
            except Exception as error:
                if storage_errors.is_unavailable(error):
                    raise
                if not committed.path.exists():
                    return {}  # the program that writes here has moved the step meanwhile
                loaded = None  # another program wrote it, or it is damaged: restoring reports that
            found = loaded if isinstance(loaded, dict) else _LOST
            self._known[committed.key] = found
        return found
