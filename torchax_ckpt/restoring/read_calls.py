"""Implements ``attach``, ``restore``, ``load`` and ``verify``: checks arguments, reads steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torchax_ckpt import torchax_backend
from torchax_ckpt.errors import (
    AttachError,
    CheckpointError,
    CorruptCheckpointError,
    ForeignCheckpointError,
    StepNotFoundError,
    UnusableStateError,
)
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.options import CheckpointOptions, TierName
from torchax_ckpt.policies import preservation
from torchax_ckpt.restoring import loading
from torchax_ckpt.restoring.fallback import is_damage, newest_readable, reading
from torchax_ckpt.restoring.local_tier import HostSteps
from torchax_ckpt.restoring.restorable_step import RestorableStep
from torchax_ckpt.restoring.restore import restore_attached
from torchax_ckpt.runtime import progress, user_messages
from torchax_ckpt.runtime.step_numbers import as_given
from torchax_ckpt.runtime.user_messages import fields
from torchax_ckpt.saving.run import Run
from torchax_ckpt.saving.tier import Tier
from torchax_ckpt.saving.training_loop.loop import Loop
from torchax_ckpt.state.findings import RestoreReport
from torchax_ckpt.state.training_state import FUNCTIONAL, TrainingState
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.stored import named_steps
from torchax_ckpt.stored.foreign_step import ForeignStep
from torchax_ckpt.stored.stored_step import StoredStep

logger = logging.getLogger(__name__)


class ReadCalls:
    """Implements the methods that read steps; what can fail on one process alone is in a round."""

    def __init__(self, run: Run, loop: Loop, options: CheckpointOptions) -> None:
        self._run, self._tiers, self._loop = run, run.tiers, loop
        self._options = options

    def attach(
        self, make: Callable[[], TrainingState], *, is_attached: bool, resume: bool
    ) -> tuple[TrainingState, int | None]:
        """Makes and fills the state to attach; returns it, and the restored step if there is one.

        See ``TorchaxCheckpointer.attach``.
        """
        run, options = self._run, self._options
        with run.processes.round("beginning"):
            torchax_backend.check_internals()
            if is_attached:
                raise AttachError(
                    "attach was called before on this checkpointer; attach everything in one call, "
                    "or use a second checkpointer with another directory"
                )
            run.wait()
            run.close_others()
            if not options.read_only:
                run.require_writable()
            attached = make()
        run.join_mirror(resumes=resume)
        step = self._resume(attached) if resume else None
        if step is None:
            with run.processes.round("starting anew"):
                fresh = attached.prepare_fresh()
                fresh.require_filled()
                fresh.apply({}, run.processes.meet)
            if resume:
                run.announce_new()
            else:
                path = run.durable.path
                text = "new run in %s: attach was told not to resume"
                logger.info(text, path, extra=fields(step=0, path=path))
        return attached, step

    def _resume(self, attached: TrainingState) -> int | None:
        """Restores the newest readable step; returns its number, or None without steps."""
        listed = [self._tiers.steps()]
        if not listed[0]:
            return None

        def find() -> list[CommittedStep]:
            return listed.pop() if listed else self._tiers.candidates()

        report, _ = newest_readable(
            find, lambda s: self._restore(s, attached, True), self._is_spare
        )
        return report.step

    def restore(
        self,
        step: int | str | None,
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
            checked = self._checked(step, tier)
        report, skipped = newest_readable(
            lambda: self._candidates(checked, tier),
            lambda s: self._restore(s, attached, strict, selection()),
            self._is_spare,
        )
        return dataclasses.replace(report, skipped_steps=skipped)

    def load(
        self, step: int | str | None, abstract_state: Any, filter: str | None, tier: TierName | None
    ) -> Any:
        """Returns the content of a step; see ``TorchaxCheckpointer.load``."""
        with self._run.processes.round("beginning"):
            loading.require_filter(filter, abstract_state)
            checked = self._checked(step, tier)
        state, _ = newest_readable(
            lambda: self._candidates(checked, tier),
            lambda s: self._load(s, abstract_state, filter),
            self._is_spare,
        )
        return state

    def verify(self, step: int | str | None, tier: TierName | None) -> int:
        """Compares a step with its digests; see ``TorchaxCheckpointer.verify``."""
        with self._run.processes.round("beginning"):
            checked = self._checked(step, tier)
        found = self._candidates(checked, tier)
        newest = found[-1].step
        for committed in [s for s in found if s.step == newest]:
            self._verify(committed, self._tiers.holding(committed))
        return newest

    def best_step(self) -> int | None:
        """Returns the durable, intact step that ranks first; see ``TorchaxCheckpointer``."""
        tier = self._run.durable.tier
        rule, directory = preservation.best_rule(tier.preserving.policy), tier.directory
        if not (steps := directory.steps()):
            return None
        try:
            return named_steps.ranked(rule, steps, lambda committed: directory)[-1].step
        except StepNotFoundError:
            return None

    def _verify(self, committed: CommittedStep, tier: Tier) -> None:
        """Compares a step, or a share of it, with its digests; process 0 marks the result in it."""
        # In a local tier another host may have a step that this host lacks.
        is_here = not tier.calls_channel.is_per_host or committed.path.exists()
        verified = tier.directory.verified
        marks = tier.calls_channel.is_first and not self._options.read_only
        try:
            with reading(committed, tier.directory, tier.calls_channel):
                if is_here:
                    with verified.noting_damage(committed):
                        stored = StoredStep(committed, self._options, allow_part=True)
                        name, total = f"step {committed.step}", stored.stored_bytes
                        with progress.bar(name, lambda: total) as on_bytes:
                            stored.verify(tier.calls_channel, on_bytes)
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
        """Returns whether a step is in a local tier, besides which the durable tier has steps."""
        return self._tiers.holding(committed).is_local

    def _checked(self, step: int | str | None, tier: TierName | None) -> int | str | None:
        self._tiers.named(tier)
        return as_given(step)

    def _candidates(self, step: int | str | None, tier: TierName | None) -> list[CommittedStep]:
        """Returns the steps that a checked argument means, the one to try first last."""
        if not isinstance(step, str):
            return self._tiers.candidates(step, tier)
        found = self._tiers.candidates(None, tier)

        def places() -> list[int]:
            rules = preservation.best_rules(self._run.durable.tier.preserving.policy)
            named = named_steps.named(
                step, found, lambda s: self._tiers.holding(s).directory, rules
            )
            return [found.index(committed) for committed in named]

        with self._run.processes.round("choosing the step"):  # process 0 ranks them
            return [found[i] for i in self._run.processes.first(places)]

    def _restore(
        self,
        committed: CommittedStep,
        attached: TrainingState,
        strict: bool,
        selection: Selection | None = None,
    ) -> RestoreReport:
        """Restores a step; if it is damaged, what ``Run.fetch_again`` fetches from a mirror.

        That may be an older step if no ``selection`` was given, as by ``attach``.
        """
        try:
            return self._restore_as_is(committed, attached, strict, selection)
        except (CorruptCheckpointError, UnusableStateError) as error:
            again = self._fetched_again(committed, error, or_older=selection is None)
            if again is None:
                raise
        return self._restore_as_is(again, attached, strict, selection)

    def _fetched_again(
        self, committed: CommittedStep, error: CheckpointError, *, or_older: bool
    ) -> CommittedStep | None:
        """Returns what a mirror gives in place of a step that failed to be read, if it does."""
        if not is_damage(error):
            return None
        try:
            again = self._run.fetch_again(committed, or_older=or_older)
        except CheckpointError as problem:
            if not isinstance(error, UnusableStateError):
                raise
            # Without an older step, the attached objects hold no state, which is worse.
            logger.warning("step %d is not fetched again: %s", committed.step, problem)
            return None
        if again is not None and again.key != committed.key:
            user_messages.warn(f"skipping an unreadable checkpoint: {error}")
        return again

    def _restore_as_is(
        self,
        committed: CommittedStep,
        attached: TrainingState,
        strict: bool,
        selection: Selection | None,
    ) -> RestoreReport:
        began = time.perf_counter()
        tier = self._tiers.holding(committed)
        with reading(committed, tier.directory, tier.calls_channel):
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
        durable = self._run.durable.tier
        values = {"restore_secs": secs, "is_verified": report.is_verified}
        values |= durable.mirroring.values
        durable.telemetry.restored(committed, tier.name, **values)
        if report.is_verified:
            tier.directory.verified.note(committed, is_sound=True)
        self._loop.restored_from(committed.step, is_functional=FUNCTIONAL in source.document)
        tier.reuse.restored(committed, source.compared)
        return dataclasses.replace(report, tier=tier.name)

    def _load(self, committed: CommittedStep, abstract_state: Any, filter: str | None) -> Any:
        tier, processes = self._tiers.holding(committed), self._run.processes
        with reading(committed, tier.directory, tier.calls_channel):
            source: RestorableStep | HostSteps | None = None
            with contextlib.suppress(ForeignCheckpointError):
                source = self._opened(committed, tier)
            if source is None:
                source = RestorableStep(ForeignStep(committed, self._options), processes.meet)
            state = loading.load_state(source, abstract_state, filter, processes)
        if FUNCTIONAL in source.document:
            self._loop.loaded(committed.step)
        tier.reuse.loaded(committed, source.compared)
        return state

    def _opened(self, committed: CommittedStep, tier: Tier) -> RestorableStep | HostSteps:
        options, hosts = self._options, tier.calls_channel.hosts
        if hosts is not None:
            axis, verified = self._run.replica_axis, tier.directory.verified
            return HostSteps(committed, options, hosts, axis, verified)
        return RestorableStep(StoredStep(committed, options), self._run.processes.meet)


def _listed(patterns: str | Iterable[str] | None) -> str | Iterable[str] | None:
    """Returns patterns that can be read more than once, because each attempt reads them."""
    return tuple(patterns) if isinstance(patterns, Iterator) else patterns
