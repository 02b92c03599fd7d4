"""Owns what steps say in their summaries: their metrics, and which newer steps they abandon."""

from __future__ import annotations

import concurrent.futures
import types
from collections.abc import Mapping, Sequence
from typing import Any

from torchax_ckpt.storage.directory import committed_step
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.medium import containment, seals, storage_errors

# How many commits may bear later times than the latest of all.
_LATEST = 32
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

    def abandoned_by(self, steps: Sequence[CommittedStep]) -> set[tuple[int, int]]:
        """The steps and commit times that these steps have abandoned."""
        # Only the latest commit can name steps that are still in place: whoever writes next first
        # finishes setting them aside. Clocks of several hosts do not quite say which it is.
        in_order = sorted(steps, key=lambda s: (s.has_lost_record, s.commit_timestamp_nsecs))
        # One that cannot say when it was committed may be the latest.
        latest = in_order[-_LATEST - sum(s.has_lost_record for s in steps) :]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            summaries = list(pool.map(self._of, latest))
        # An incoming step has abandoned something, whether or not it can still say what.
        lost = [s for s, said in zip(latest, summaries, strict=True) if said is _LOST]
        guessed = {
            s.key
            for incoming in lost
            if incoming.is_incoming
            for s in steps
            if s.step >= incoming.step
            and s.commit_timestamp_nsecs < incoming.commit_timestamp_nsecs
        }
        return guessed | {
            (entry[0], entry[1])
            for entries in (summary.get("abandons") for summary in summaries)
            for entry in (entries if isinstance(entries, list) else [])
            if isinstance(entry, list) and [type(part) for part in entry] == [int, int]
        }

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
