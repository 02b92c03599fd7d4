"""Implements ``restore``, ``load`` and ``verify``: checks the arguments, finds and reads steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torchax_ckpt.errors import CorruptCheckpointError, ForeignCheckpointError
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.options import CheckpointOptions, TierName
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.restoring.fallback import newest_readable, reading
from torchax_ckpt.restoring.local_tier import HostSteps
from torchax_ckpt.restoring.restorable_step import RestorableStep
from torchax_ckpt.restoring.restore import restore_attached
from torchax_ckpt.runtime import progress
from torchax_ckpt.runtime.call_guard import as_step
from torchax_ckpt.runtime.user_messages import fields
from torchax_ckpt.saving.run import Run
from torchax_ckpt.saving.tier import Tier
from torchax_ckpt.state import functional, per_process_state
from torchax_ckpt.state.findings import Findings, RestoreReport
from torchax_ckpt.state.training_state import FUNCTIONAL, TrainingState
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.stored.foreign_step import ForeignStep
from torchax_ckpt.stored.stored_step import StoredStep, about

logger = logging.getLogger(__name__)


class ReadCalls:
    """Implements the methods that read steps; what can fail on one process alone is in a round."""

    def __init__(self, run: Run, options: CheckpointOptions) -> None:
        self._run = run
        self._options = options

    def resume(self, attached: TrainingState) -> int | None:
        """Restores the newest readable step; returns its number, or None without steps."""
        if not (candidates := self._run.steps()):
            return None
        report, _ = newest_readable(
            candidates, lambda s: self._restore(s, attached, strict=True), self._is_spare
        )
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
        with self._run.processes.round("beginning"):
            attached = require_attached()
            self._run.wait()
            selection = functools.partial(Selection, _listed(include), _listed(exclude), rename)
            selection()  # raises for what is no pattern
            number = self._checked(step, tier)
        report, skipped = newest_readable(
            self._run.candidates(number, tier),
            lambda s: self._restore(s, attached, strict, selection()),
            self._is_spare,
        )
        return dataclasses.replace(report, skipped_steps=skipped)

    def load(self, step: int | None, abstract_state: Any, tier: TierName | None) -> Any:
        """Returns the content of a step; see ``TorchaxCheckpointer.load``."""
        with self._run.processes.round("beginning"):
            number = self._checked(step, tier)
        candidates = self._run.candidates(number, tier)
        state, _ = newest_readable(
            candidates, lambda s: self._load(s, abstract_state), self._is_spare
        )
        return state

    def verify(self, step: int | None, tier: TierName | None) -> int:
        """Compares a step with its digests; see ``TorchaxCheckpointer.verify``."""
        with self._run.processes.round("beginning"):
            number = self._checked(step, tier)
        found = self._run.candidates(number, tier)
        newest = found[-1].step
        for committed in [s for s in found if s.step == newest]:
            self._verify(committed, self._run.holding(committed))
        return newest

    def _verify(self, committed: CommittedStep, tier: Tier) -> None:
        """Compares a step, or a share of it, with its digests; process 0 marks the result in it."""
        # In a local tier another host may have a step that this host lacks.
        is_here = not tier.calls.is_per_host or committed.path.exists()
        verified = tier.directory.verified
        marks = tier.calls.is_first and not self._options.read_only
        try:
            with reading(committed, tier.directory, tier.calls):
                if is_here:
                    with verified.noting_damage(committed):
                        stored = StoredStep(committed, self._options, allow_part=True)
                        name, total = f"step {committed.step}", stored.stored_bytes
                        with progress.bar(name, lambda: total) as on_bytes:
                            stored.verify(tier.calls, on_bytes)
            if is_here:
                verified.note(committed, is_sound=True)
        except CorruptCheckpointError:
            if marks:
                with contextlib.suppress(Exception):  # the damage is the error to raise
                    verified.mark(tier.directory.steps())  # others may share the damaged file
            raise
        finally:
            if marks:
                verified.mark([committed])

    def _is_spare(self, committed: CommittedStep) -> bool:
        """Returns whether a step is one in a local tier, of which the durable tier has others."""
        return self._run.holding(committed).is_local

    def _checked(self, step: int | None, tier: TierName | None) -> int | None:
        self._run.named(tier)
        return None if step is None else as_step(step)

    def _restore(
        self,
        committed: CommittedStep,
        attached: TrainingState,
        strict: bool,
        selection: Selection | None = None,
    ) -> RestoreReport:
        began = time.perf_counter()
        tier = self._run.holding(committed)
        with reading(committed, tier.directory, tier.calls):
            source = self._opened(committed, tier)
            report = restore_attached(
                source, attached, strict, self._options, self._run.processes, selection
            )
        secs = time.perf_counter() - began
        where = tier.directory.path  # the step itself may be on other hosts only
        which = "" if self._run.local is None else f" ({tier.name} tier)"
        age = "" if committed.has_lost_record else f", saved {committed.age()} ago"
        verb, replaced = "restored", ""
        if selection is None:
            verb = "resumed from"
            replaced = ", in place of values that had been trained" * attached.was_trained
        text = f"{verb} step {report.step} of {where}{which}{age}{replaced}"
        about = fields(step=report.step, path=where, secs=secs, age_secs=committed.age_secs)
        logger.info("%s", text, extra=about)
        values = {"restore_secs": secs, "is_verified": report.is_verified}
        self._run.durable.tier.telemetry.restored(committed, tier.name, **values)
        if report.is_verified:
            tier.directory.verified.note(committed, is_sound=True)
        tier.reuse.restored(committed, source.compared)
        return dataclasses.replace(report, tier=tier.name)

    def _load(self, committed: CommittedStep, abstract_state: Any) -> Any:
        tier, processes = self._run.holding(committed), self._run.processes
        with reading(committed, tier.directory, tier.calls):
            source: RestorableStep | HostSteps | None = None
            with contextlib.suppress(ForeignCheckpointError):
                source = self._opened(committed, tier)
            if source is None:
                source = RestorableStep(ForeignStep(committed, self._options), processes.meet)
            state = load_state(source, abstract_state, processes)
        tier.reuse.loaded(committed, source.compared)
        return state

    def _opened(self, committed: CommittedStep, tier: Tier) -> RestorableStep | HostSteps:
        options, hosts = self._options, tier.calls.hosts
        if hosts is not None:
            axis, verified = self._run.replica_axis, tier.directory.verified
            return HostSteps(committed, options, hosts, axis, verified)
        return RestorableStep(StoredStep(committed, options), self._run.processes.meet)


def _listed(patterns: str | Iterable[str] | None) -> str | Iterable[str] | None:
    """Returns patterns that can be read more than once, because each attempt reads them."""
    return tuple(patterns) if isinstance(patterns, Iterator) else patterns


def load_state(
    source: RestorableStep | HostSteps, abstract_state: Any, processes: Processes
) -> Any:
    """Returns a step's functional state, or the states of the components in ``abstract_state``."""
    committed = source.committed
    findings = Findings()
    prefix: tuple[str, ...] = ()
    is_foreign = isinstance(source, RestorableStep) and isinstance(source.stored, ForeignStep)
    if FUNCTIONAL in source.document:
        root = source.document[FUNCTIONAL]
        prefix = () if is_foreign else (FUNCTIONAL,)
    else:
        components = abstract_state.keys() if isinstance(abstract_state, Mapping) else None
        document = per_process_state.document_of(
            source.document, processes.index, processes.count, f"step {committed.step}"
        )
        root = {
            "dict": [[n, d] for n, d in document.items() if components is None or n in components]
        }
    with about(committed):
        request = functional.Request(root, abstract_state, prefix, findings, is_foreign=is_foreign)
        if findings:
            raise findings.error(committed.step, str(committed.path), "load")
        source.require_plausible(request.reads)
        return request.build(source.read_leaves(request.reads))
