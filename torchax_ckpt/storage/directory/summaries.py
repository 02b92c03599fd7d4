"""Reads and caches the summaries of steps: small JSON with metrics and abandoned steps."""

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
    """Reads the summaries of a directory's steps, and keeps each of them in memory."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Mapping[str, Any]] = {}

    def know(self, committed: CommittedStep, summary: Mapping[str, Any]) -> None:
        """Keeps a just-written summary in memory, so that it need not be read from storage."""
        self._known[committed.key] = summary

    def forget(self, committed: CommittedStep) -> None:
        """Drops a deleted step's summary from memory, because a run may save millions of steps."""
        self._known.pop(committed.key, None)

    def metrics(self, committed: CommittedStep) -> dict[str, Any]:
        """Returns the metrics saved with a step; {} if there are none."""
        metrics = self._of(committed).get("metrics")
        return dict(metrics) if isinstance(metrics, dict) else {}

    def read(self, steps: Sequence[CommittedStep]) -> list[Mapping[str, Any] | None]:
        """Returns the summary of each step; None for a step whose summary is missing or damaged."""
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
