"""Implements ``restore``, ``load`` and ``verify``: checks the arguments, finds and reads steps."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.options import CheckpointOptions, TierName
from torchax_ckpt.restoring.fallback import newest_readable, reading
from torchax_ckpt.restoring.load import load_state
from torchax_ckpt.restoring.restore import RestoreReport, restore_attached
from torchax_ckpt.restoring.step_reader import Source
from torchax_ckpt.restoring.verify import verify_step
from torchax_ckpt.runtime.step_number import as_step
from torchax_ckpt.saving.tiers import Tiers
from torchax_ckpt.state.training_state import TrainingState
from torchax_ckpt.storage.directory.committed_step import CommittedStep

logger = logging.getLogger(__name__)


class ReadCalls:
    """Implements the methods of one checkpointer that read steps.

    Whatever one process alone can get wrong is checked within a round, so that all processes fail
    alike.
    """

    def __init__(self, tiers: Tiers, options: CheckpointOptions) -> None:
        self._tiers = tiers
        self._options = options

    def resume(self, attached: TrainingState) -> int | None:
        """Restores the newest readable step; returns its number, or None without steps."""
        if not (candidates := self._tiers.steps()):
            return None
        report, _ = newest_readable(candidates, lambda s: self._restore(s, attached, strict=True))
        return report.step

    def restore(
        self,
        step: int | None,
        require_attached: Callable[[], TrainingState],
        *,
        strict: bool,
        include: str | Iterable[str] | None,
        exclude: str | Iterable[str] | None,
        rename: Mapping[str, str] | None,
        tier: TierName | None,
    ) -> RestoreReport:
        """Restores a step into the attached objects; see ``TorchaxCheckpointer.restore``."""
        with self._tiers.processes.round("beginning"):
            attached = require_attached()
            self._tiers.wait()
            selection = functools.partial(Selection, _listed(include), _listed(exclude), rename)
            selection()  # raises for what is no pattern
            number = self._checked(step, tier)
        report, skipped = newest_readable(
            self._tiers.candidates(number, tier),
            lambda s: self._restore(s, attached, strict, selection()),
        )
        return dataclasses.replace(report, skipped_steps=skipped)

    def load(self, step: int | None, abstract_state: Any, tier: TierName | None) -> Any:
        """Returns the content of a step; see ``TorchaxCheckpointer.load``."""
        with self._tiers.processes.round("beginning"):
            number = self._checked(step, tier)
        candidates = self._tiers.candidates(number, tier)
        state, _ = newest_readable(candidates, lambda s: self._load(s, abstract_state))
        return state

    def verify(self, step: int | None, tier: TierName | None) -> int:
        """Compares a step with its digests; see ``TorchaxCheckpointer.verify``."""
        with self._tiers.processes.round("beginning"):
            number = self._checked(step, tier)
        found = self._tiers.candidates(number, tier)
        newest = found[-1].step
        for committed in [s for s in found if s.step == newest]:
            place = self._tiers.holding(committed)
            verify_step(committed, place.directory, place.processes, self._options)
        return newest

    def _checked(self, step: int | None, tier: TierName | None) -> int | None:
        self._tiers.require(tier)
        return None if step is None else as_step(step)

    def _restore(
        self,
        committed: CommittedStep,
        attached: TrainingState,
        strict: bool,
        selection: Selection | None = None,
    ) -> RestoreReport:
        began = time.perf_counter()
        tier = self._tiers.holding(committed)
        with reading(committed, tier.directory, tier.processes):
            source = self._tiers.opened(committed)
            report = restore_attached(
                source, attached, strict, self._options, self._tiers.processes, selection
            )
        secs = time.perf_counter() - began
        where = tier.directory.path  # the step itself may be on other hosts only
        which = "" if self._tiers.local is None else f" ({tier.name} tier)"
        age = "" if committed.has_lost_record else f", saved {committed.age()} ago"
        verb, replaced = "restored", ""
        if selection is None:
            verb = "resumed from"
            replaced = ", in place of values that had been trained" * attached.was_trained
        logger.info("%s step %s of %s%s%s%s", verb, report.step, where, which, age, replaced)
        values = {"secs": secs, "is_verified": report.is_verified, "tier": tier.name}
        self._tiers.durable.telemetry.emit("restored", report.step, **values)
        tier.restored(committed, source.compared, is_verified=report.is_verified)
        return dataclasses.replace(report, tier=tier.name)

    def _load(self, committed: CommittedStep, abstract_state: Any) -> Any:
        tier = self._tiers.holding(committed)
        sources: list[Source] = []

        def opened(committed: CommittedStep) -> Source:
            sources.append(self._tiers.opened(committed))
            return sources[-1]

        with reading(committed, tier.directory, tier.processes):
            processes = self._tiers.processes
            state = load_state(committed, opened, abstract_state, self._options, processes)
        for source in sources:
            tier.loaded(committed, source.compared)
        return state


def _listed(patterns: str | Iterable[str] | None) -> str | Iterable[str] | None:
    """Returns patterns that can be read more than once, because each attempt reads them."""
    return tuple(patterns) if isinstance(patterns, Iterator) else patterns
