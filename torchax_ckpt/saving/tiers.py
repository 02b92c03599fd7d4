"""The tiers of a run: its durable directory, and optionally a local one for more frequent saves.

Both work alike, each with its own steps, history, saver and policies. The run resumes from its
newest step that is not abandoned; if both tiers have it, from the local tier, which is closer.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from etils import epath

from torchax_ckpt import policies
from torchax_ckpt.errors import ArgumentError, CheckpointError, TierError
from torchax_ckpt.options import CheckpointOptions, LocalTier, TierName
from torchax_ckpt.policies import described, preservation, save_decision
from torchax_ckpt.processes.coordination import Processes, open_channel
from torchax_ckpt.processes.decision_windows import DecisionWindows
from torchax_ckpt.processes.per_host import PerHostProcesses
from torchax_ckpt.runtime.call_guard import Calls
from torchax_ckpt.runtime.lazily import root_logger_left_alone
from torchax_ckpt.saving.closing import Closing, close_others
from torchax_ckpt.saving.deadline import Deadline
from torchax_ckpt.saving.preserving import Preserving
from torchax_ckpt.saving.saver import Saver
from torchax_ckpt.saving.unchanged.reuse import Reuse
from torchax_ckpt.storage.directory import committed_step, new_runs
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory, checkpoint_info
from torchax_ckpt.storage.directory.run_history import RunHistory
from torchax_ckpt.storage.medium import location, medium
from torchax_ckpt.stored.stored_step import Compared
from torchax_ckpt.telemetry.events import Event
from torchax_ckpt.telemetry.recorder import Telemetry

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RunTier:
    """One tier and its parts. Its ``processes`` are a channel between training threads."""

    name: TierName
    directory: RunDirectory
    history: RunHistory
    saver: Saver
    telemetry: Telemetry
    processes: Processes
    reuse: Reuse
    policy: policies.SaveDecisionPolicy
    decisions: Processes  # a channel for save decisions only
    deadline: Deadline | None  # None: no save is due because of it

    @functools.cached_property
    def windows(self) -> DecisionWindows:
        """Decides which steps to save to this tier, with one answer for all processes."""
        return DecisionWindows(self.decisions, self._ask)

    @functools.cached_property
    def _observers(self) -> list[Any]:
        return save_decision.observers(self.policy)

    def tell_preemption(self, step: int) -> None:
        """Tells the policy, on process 0, that a step is saved because of a preemption."""
        if not self.decisions.is_first:
            return
        try:
            self._ask(step, reached_preemption=True)
        except Exception:
            logger.warning(
                "step %d: the save decision policy failed at a preemption; the step is saved "
                "whatever the policy says",
                step,
                exc_info=True,
            )

    def _ask(
        self, step: int, coming: Sequence[int] = (), *, reached_preemption: bool = False
    ) -> bool:
        """Returns the policy's answer; the saves of steps ``coming`` are decided, not begun."""
        while self.saver.finished:
            cost = self.saver.finished.popleft()
            for observer in self._observers:
                observer.observe_save(
                    blocking_secs=cost.blocking_secs, durable_secs=cost.durable_secs
                )
        asked, *decided = (
            checkpoint_info(CommittedStep(n, self.history.path, time.time_ns()))
            for n in (step, *coming)
        )
        # Not copied, because this runs at each step and there may be many checkpoints.
        known = self.history.checkpoints()
        context = save_decision.decision_context(
            is_saving_in_progress=bool(coming) or self.saver.is_saving,
            reached_preemption=reached_preemption,
        )
        is_due = self.deadline is not None and self.deadline.needs_save
        if is_due and not reached_preemption:
            return not context.is_saving_in_progress
        with root_logger_left_alone():  # Orbax's policies log
            return self.policy.should_save(
                asked, (*known, *decided) if decided else known, context=context
            )

    def restored(
        self, committed: CommittedStep, compared: Compared | None, *, is_verified: bool
    ) -> None:
        """Records that this run restored a step of this tier, having compared these leaves."""
        if is_verified:
            self.directory.verified.note(committed, is_sound=True)
        self.reuse.restored(committed, compared)

    def loaded(self, committed: CommittedStep, compared: Compared | None) -> None:
        """Records that this run read a step of this tier; ``compared`` as for ``restored``."""
        self.reuse.loaded(committed, compared)


class Tiers:
    """The tiers of a run; iteration yields the durable tier, then the local tier if there is one.

    Raises PolicyError, TierError and DirectoryError.
    """

    def __init__(
        self,
        directory: Any,
        save_decision_policy: Any,
        preservation_policy: Any,
        local: LocalTier | None,
        options: CheckpointOptions,
        on_event: Callable[[Event], None] | None,
        on_donated: Callable[[], None],
    ) -> None:
        self._options = options
        self._on_event = on_event
        self._on_donated = on_donated
        durable = RunDirectory(directory, read_only=options.read_only)
        durable.require_run()
        self.processes = open_channel(f"calls {durable.path}", options.process_timeout_secs)
        self.call_log = self.processes.log
        self.processes.liveness.add(self.call_log)
        saves = self._connect(f"saves {durable.path}")
        self._tiers: list[RunTier] = []
        self.deadline = Deadline(
            self._connect(f"deadline {durable.path}"),
            options.deadline,
            options.deadline_margin_secs,
            lambda: self.durable.saver.longest_secs,
        )
        self.durable = self._tier(
            "durable", durable, save_decision_policy, preservation_policy, self.processes, saves
        )
        self._tiers.append(self.durable)
        self.local: RunTier | None = None
        self._is_open = self._is_named = self._is_announced = False
        self._name = uuid.uuid4().hex
        if local is not None:
            if options.restore_in_budget and self.processes.count > 1:
                raise TierError(
                    "on several processes, a local tier restores all leaves together, but "
                    "restore_in_budget restores leaves in parts that differ between processes: "
                    "give either local=LocalTier(...) or restore_in_budget=True, not both"
                )
            nearby = RunDirectory(local.path, read_only=options.read_only, durable=durable)
            nearby.require_run()
            _require_apart(nearby.path, durable.path)
            saves = self._connect(f"local saves {durable.path}")
            self.replica_axis = local.replica_axis
            self.local = self._tier(
                "local",
                nearby,
                local.save_decision_policy,
                policies.LatestN(local.keep),
                PerHostProcesses(self.processes),
                PerHostProcesses(saves),
            )
            self._tiers.append(self.local)

    def _tier(
        self,
        name: TierName,
        directory: RunDirectory,
        save_policy: Any,
        keep_policy: Any,
        calls: Processes,
        saves: Processes,
    ) -> RunTier:
        if save_policy is None:
            save_policy = policies.AnySavePolicy(
                [policies.ContinuousCheckpointingPolicy(), policies.PreemptionCheckpointingPolicy()]
            )
        of_tier = "LocalTier: " if name == "local" else ""
        preservation.require_policy(f"{of_tier}save_decision_policy", save_policy, "should_save")
        preservation.require_policy("preservation_policy", keep_policy, "should_preserve")
        history = RunHistory(directory, calls, None if name == "durable" else self.durable.history)
        on_event = self._on_event if name == "durable" else None
        rules = described.described(keep_policy)
        telemetry = Telemetry(directory.path, on_event, rules, directory.abandoned)
        preserving = Preserving(
            directory, keep_policy, self._options, saves, is_local=name == "local"
        )
        is_single = name == "local" and keep_policy.n == 1  # two copies would take more space
        reuse = Reuse(
            directory,
            history,
            preserving,
            saves,
            False if self._options.read_only else self._options.reuse,
            has_two_copies=not is_single and medium.of(directory.path).has_links,
            leader=None if name == "durable" else self.durable.reuse,
        )
        parts = directory, history, preserving, self._options, telemetry, calls, saves
        saver = Saver(*parts, reuse, self._on_donated)
        durable = self._tiers[0].directory if self._tiers else directory
        decisions = self._connect(f"{name} decisions {durable.path}")
        deadline = self.deadline if name == "durable" else None
        parts_of_tier = directory, history, saver, telemetry, calls, reuse, save_policy, decisions
        return RunTier(name, *parts_of_tier, deadline)

    def __iter__(self) -> Iterator[RunTier]:
        return iter(self._tiers)

    def _connect(self, channel: str) -> Processes:
        return open_channel(channel, self._options.process_timeout_secs, self.call_log)

    # --- finding steps ---

    def candidates(
        self, step: int | None = None, name: TierName | None = None
    ) -> list[CommittedStep]:
        """Returns all ``steps``, or those of one number; raises StepNotFoundError without any."""
        paths = [tier.directory.path for tier in self.named(name)]
        return committed_step.chosen(self.steps(name), step, paths)

    def steps(self, name: TierName | None = None) -> list[CommittedStep]:
        """Returns the steps of one tier or all, ascending; of equal steps, the local one last."""
        tiers, (local_steps, _) = self.named(name), self._compare_local_steps()
        found = []
        for tier in tiers:
            if tier is self.local and self.processes.count > 1:
                found += [local_steps[key] for key in sorted(local_steps)]
            else:
                found += tier.history.found(tier.directory.steps)
        return sorted(found, key=lambda s: s.step)  # stable: the local one stays last

    def find(self, step: int) -> CommittedStep:
        """Returns a step, preferably local, from readable directories, without messages."""
        found: list[CommittedStep] = []
        for tier in reversed(self._tiers):  # the other one need not be readable if this has it
            found += tier.directory.steps()
            if same := [s for s in found if s.step == step]:
                return same[-1]
        return committed_step.chosen(found, step, [tier.directory.path for tier in self])[-1]

    def _compare_local_steps(self) -> tuple[dict[Key, CommittedStep], set[Key]]:
        """Returns steps of any host's local tier, not abandoned; the keys that all hosts have."""
        if self.local is None or self.processes.count == 1:
            return {}, set()
        directory = self.local.directory
        with self.processes.round("comparing local steps"):
            here = {s.key: s for s in directory.steps()}
            told = directory.abandonment.told(here.values())
            compared = self.processes.combine(told, directory.abandonment.compared)
        # The keys of the steps that all hosts have, and of those that any host has.
        on_all, on_any = directory.abandonment.learn(compared)
        # A step that this host lacks gets a path that does not exist, because this host may have
        # another step with the same number.
        elsewhere = {
            (step, at): CommittedStep(step, directory.path / f"{step}-on-another-host", at)
            for step, at in on_any - here.keys()
        }
        return {key: here[key] for key in on_any & here.keys()} | elsewhere, on_all

    def numbers(self, name: TierName | None = None) -> list[int]:
        """Returns step numbers, ascending, from readable directories only, without messages."""
        return sorted({s.step for tier in self.named(name) for s in tier.directory.steps()})

    def holding(self, committed: CommittedStep) -> RunTier:
        """Returns the tier whose directory contains the given step."""
        return next(t for t in self._tiers if t.directory.path == committed.path.parent)

    def named(self, name: TierName | None) -> list[RunTier]:
        """Returns one tier or all; raises TierError if there is no tier of this name."""
        tiers = [tier for tier in self._tiers if name in (None, tier.name)]
        if not tiers:
            raise TierError(
                f"tier: expected one of {', '.join(t.name for t in self._tiers)}, found {name!r}; "
                "a local tier is given as TorchaxCheckpointer(directory, local=LocalTier(path))"
            )
        return tiers

    # --- saving ---

    def require_writable(self) -> None:
        """Raises DirectoryError if the directory of a tier must not be written."""
        for tier in self._tiers:
            tier.directory.require_writable()

    def claim(self, step: int | None = None) -> None:
        """Acquires the tiers' leases, unless held; raises if a directory cannot be written."""
        for tier in self._tiers:
            tier.saver.claim(step, functools.partial(close_others, tier.saver))

    def prepare(self, step: int) -> None:
        """Acquires leases and stores the run's name, unless done, on all processes or on none."""
        if not all(tier.saver.is_claimed for tier in self._tiers):
            self._name, self._is_named = uuid.uuid4().hex, False
        self.claim(step)
        if self._is_named:
            return
        # In both tiers: see ``storage/directory/run_identity.py``.
        with self.processes.round("naming the run"):
            durable = self.durable.directory
            if self.local is None:
                self.processes.first(durable.leave_tiers)
            else:
                name = self.processes.first(lambda: self._name)
                self.local.directory.join(self.processes.first(durable.runs), name)
                self.processes.meet()
                self.processes.first(lambda: durable.join([], name))
        self._is_named = True

    def announce_new(self) -> None:
        """Says once, if the run has no steps, that it is new; see ``new_runs.py``."""
        is_known, self._is_announced = self._is_announced, True
        if is_known or self._options.read_only or not self.processes.is_first:
            return
        if not any(tier.history.branches.in_place for tier in self._tiers):
            new_runs.announce(self.durable.directory.path)

    def wait(self, timeout_secs: float | None = None) -> None:
        """Waits until no save is in flight in any tier."""
        if not isinstance(timeout_secs, int | float | None):
            raise ArgumentError(
                f"timeout_secs: expected a number of seconds or None, found {timeout_secs!r:.80}"
            )
        deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
        for tier in self._tiers:
            tier.saver.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def check_for_errors(self, kind: type[CheckpointError] = CheckpointError) -> None:
        """Raises the durable tier's oldest unraised failure; if none, the local tier's."""
        for tier in self._tiers:
            tier.saver.check_for_errors(kind)

    def open(self) -> None:
        """Lists the steps in the directory of each tier, unless the steps are listed already."""
        if not self._is_open:
            self.close_others()
            _, on_all = self._compare_local_steps()
            for tier in self._tiers:
                tier.history.open()
            self._forget_what_others_lack(on_all)
            self._is_open = True

    def go_on_from(self, step: int | None) -> None:
        """Continues the run from ``step`` (None: from the start), and abandons all newer steps."""
        _, on_all = self._compare_local_steps()
        self.call_log.go_on_from(step)
        for tier in self._tiers:
            tier.history.go_on_from(step)
        self._forget_what_others_lack(on_all)
        self._is_open = True

    def _forget_what_others_lack(self, on_all: set[Key]) -> None:
        """Leaves out local steps that a host lacks, so that all hosts decide alike."""
        if self.local is not None and self.processes.count > 1:
            self.local.history.keep_only(on_all)

    def delete(self, step: int, name: TierName | None = None) -> None:
        """Deletes a step from one tier or all; raises as ``candidates`` does."""
        found = self.candidates(step, name)
        self.claim()  # after the search, so that a missing step does not create a directory
        for committed in found:
            self.holding(committed).saver.delete(step)

    def close_others(self) -> None:
        """Closes collected or half-closed checkpointers of this process that may write here."""
        for tier in self._tiers:
            close_others(tier.saver)

    def closing(self, calls: Calls, last: Callable[[], None]) -> Closing:
        """Returns a ``Closing`` that ends the saves, releases leases and then calls ``last``."""
        watch, log = self.processes.liveness, self.call_log

        def end() -> None:
            last()
            watch.remove(log)

        savers, windows = [t.saver for t in self._tiers], [t.windows for t in self._tiers]
        return Closing(savers, [*windows, self.deadline], calls, end)


def _require_apart(local: epath.Path, durable: epath.Path) -> None:
    if location.is_within(local, durable) or location.is_within(durable, local):
        raise TierError(
            f"LocalTier: path: expected a directory apart from the run's, {durable}, found "
            f"{local}: one is the other, or lies in it. Give the local tier a directory of its "
            "own, on a ramdisk or a local disk of each host",
            path=local,
        )
