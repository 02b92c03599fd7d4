"""The summaries of a directory's steps: small JSON with the metrics, and what else a save says."""

from __future__ import annotations

import concurrent.futures
import types
from collections.abc import Mapping, Sequence
from typing import Any

from torchax_ckpt.storage.directory import committed_step
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.medium import containment, seals, storage_errors

# The summary of a step that has none, or a damaged one.
_LOST: Mapping[str, Any] = types.MappingProxyType({})


class Summaries:
    """The summaries of a directory's steps; each is read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Mapping[str, Any]] = {}

    def know(self, committed: CommittedStep, summary: Mapping[str, Any]) -> None:
        """Takes the summary that was just written, which then need not be read."""
        self._known[committed.key] = summary

    def forget(self, committed: CommittedStep) -> None:
        """Lets go of the summary of a step that was deleted; a run may have millions of them."""
        self._known.pop(committed.key, None)

    def metrics(self, committed: CommittedStep) -> dict[str, Any]:
        """The metrics saved with a step; {} if there are none."""
        metrics = self._of(committed).get("metrics")
        return dict(metrics) if isinstance(metrics, dict) else {}

    def read(self, steps: Sequence[CommittedStep]) -> list[Mapping[str, Any] | None]:
        """The summary of each step; None of one that has none, or a damaged one."""
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
                    return {}  # moved meanwhile, by whoever writes here
                loaded = None  # not written by this package, or damaged: restoring will tell
            found = loaded if isinstance(loaded, dict) else _LOST
            self._known[committed.key] = found
        return found
