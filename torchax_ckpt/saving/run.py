"""A run: its tiers, the channel between its processes, its name, and where it continues from.

The durable tier is the run's directory; a local one, on a disk of each host, gets more frequent
saves. Both work alike, each with its own steps, saves and policies. The run resumes from its newest
step that is not abandoned; if both tiers have it, from the local tier, which is closer.
"""

from __future__ import annotations

import functools
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from torchax_ckpt import policies
from torchax_ckpt.errors import ArgumentError, CheckpointError, TierError
from torchax_ckpt.layout import names
from torchax_ckpt.options import CheckpointOptions, LocalTier, TierName
from torchax_ckpt.policies import preservation, preservation_rules
from torchax_ckpt.processes.coordination import Processes, open_channel
from torchax_ckpt.processes.per_host import PerHostProcesses
from torchax_ckpt.runtime.call_guard import Calls
from torchax_ckpt.runtime.user_messages import fields, tell
from torchax_ckpt.saving.claim import Claim
from torchax_ckpt.saving.closing import Closing, close_others
from torchax_ckpt.saving.failures import Failures
from torchax_ckpt.saving.preserving import Preserving
from torchax_ckpt.saving.reuse.frozen_leaves import FrozenLeaves
from torchax_ckpt.saving.reuse.reuse import Reuse
from torchax_ckpt.saving.run_history import RunHistory
from torchax_ckpt.saving.saver import Saver
from torchax_ckpt.saving.tier import Tier
from torchax_ckpt.saving.training_loop.deadline import Deadline
from torchax_ckpt.snapshot.snapshotter import Snapshotter
from torchax_ckpt.storage.directory import commit_record, committed_step
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import location, medium
from torchax_ckpt.telemetry.events import Event
from torchax_ckpt.telemetry.recorder import Telemetry

logger = logging.getLogger(__name__)


class Run:
    """What one checkpointer works on; iteration yields the savers, that of the durable tier first.

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
    ) -> None:
        self._options, self._on_event = options, on_event
        self.snapshotter = Snapshotter(options.snapshot, options.layout)
        durable = RunDirectory(directory, read_only=options.read_only)
        durable.require_run()
        path = durable.path
        self.processes = open_channel(f"calls {path}", options.process_timeout_secs)
        self.call_log = self.processes.log
        self.processes.liveness.add(self.call_log)
        saves = self._connect(f"saves {path}")
        self.frozen_leaves = FrozenLeaves(options.reuse, self.processes)
        self.deadline = Deadline(
            self._connect(f"deadline {path}"),
            options.deadline,
            options.deadline_margin_secs,
            lambda: self.durable.tier.costs.longest_secs,
        )
        self._histories: list[RunHistory] = []
        rules = save_decision_policy, preservation_policy
        tier = self._tier("durable", durable, *rules, self.processes, saves)
        self.durable = Saver(tier, self.deadline)
        self.local: Saver | None = None
        self._savers = [self.durable]
        self._is_open = self._is_named = self._is_announced = False
        if local is not None:
            self._add_local(local)

    def _add_local(self, local: LocalTier) -> None:
        options, durable = self._options, self.durable.tier.directory
        if options.restore_in_budget and self.processes.count > 1:
            raise TierError(
                "on several processes, a local tier restores all leaves together, but "
                "restore_in_budget restores leaves in parts that differ between processes: "
                "give either local=LocalTier(...) or restore_in_budget=True, not both"
            )
        nearby = RunDirectory(local.path, read_only=options.read_only, durable=durable)
        nearby.require_run()
        _require_apart(nearby.path, durable.path)
        self.replica_axis = local.replica_axis
        tier = self._tier(
            "local",
            nearby,
            local.save_decision_policy,
            policies.LatestN(local.keep),
            PerHostProcesses(self.processes),
            PerHostProcesses(self._connect(f"local saves {durable.path}")),
        )
        self.local = Saver(tier)
        self._savers.append(self.local)

    def _tier(
        self,
        name: TierName,
        directory: RunDirectory,
        save_policy: Any,
        keep_policy: Any,
        calls: Processes,
        saves: Processes,
    ) -> Tier:
        if save_policy is None:
            save_policy = policies.AnySavePolicy(
                [policies.ContinuousCheckpointingPolicy(), policies.PreemptionCheckpointingPolicy()]
            )
        is_local = name == "local"
        of_tier = "LocalTier: " if is_local else ""
        preservation.require_policy(f"{of_tier}save_decision_policy", save_policy, "should_save")
        preservation.require_policy("preservation_policy", keep_policy, "should_preserve")
        history = RunHistory(directory, calls, self._histories)
        telemetry = Telemetry(
            directory.path,
            None if is_local else self._on_event,
            preservation_rules.rules_of(keep_policy),
            directory.abandoned,
        )
        options = self._options
        preserving = Preserving(directory, keep_policy, options, saves, is_local=is_local)
        is_single = is_local and keep_policy.n == 1  # two copies would take more space
        reuse = Reuse(
            directory,
            history,
            preserving,
            saves,
            self.frozen_leaves,
            has_two_copies=not is_single and medium.of(directory.path).has_links,
        )
        return Tier(
            name=name,
            directory=directory,
            save_policy=save_policy,
            options=options,
            telemetry=telemetry,
            calls=calls,
            saves=saves,
            decisions=self._connect(f"{name} decisions {self._histories[0].path}"),
            history=history,
            claim=Claim(directory, history, telemetry, calls),
            preserving=preserving,
            reuse=reuse,
            failures=Failures(directory.path, telemetry, is_local=is_local),
            on_donated=self.snapshotter.donated,
        )

    def __iter__(self) -> Iterator[Saver]:
        return iter(self._savers)

    @property
    def tiers(self) -> list[Tier]:
        """The durable tier, then the local tier if there is one."""
        return [saver.tier for saver in self._savers]

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
            if tier.is_local and self.processes.count > 1:
                found += [local_steps[key] for key in sorted(local_steps)]
            else:
                found += tier.history.found(tier.directory.steps)
        return sorted(found, key=lambda s: s.step)  # stable: the local one stays last

    def find(self, step: int) -> CommittedStep:
        """Returns a step, preferably local, from readable directories, without messages."""
        found: list[CommittedStep] = []
        for tier in reversed(self.tiers):  # the other one need not be readable if this has it
            found += tier.directory.steps()
            if same := [s for s in found if s.step == step]:
                return same[-1]
        return committed_step.chosen(found, step, [tier.directory.path for tier in self.tiers])[-1]

    def _compare_local_steps(self) -> tuple[dict[Key, CommittedStep], set[Key]]:
        """Returns steps of any host's local tier, not abandoned; the keys that all hosts have."""
        if self.local is None or self.processes.count == 1:
            return {}, set()
        directory = self.local.tier.directory
        with self.processes.round("comparing local steps"):
            here = {s.key: s for s in directory.steps()}
            report = directory.abandonment.report(here.values())
            joined = self.processes.combine(report, directory.abandonment.joined)
        # The keys of the steps that all hosts have, and of those that any host has.
        on_all, on_any = directory.abandonment.record(joined)
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

    def holding(self, committed: CommittedStep) -> Tier:
        """Returns the tier whose directory contains the given step."""
        return next(t for t in self.tiers if t.directory.path == committed.path.parent)

    def named(self, name: TierName | None) -> list[Tier]:
        """Returns one tier or all; raises TierError if there is no tier of this name."""
        tiers = [tier for tier in self.tiers if name in (None, tier.name)]
        if not tiers:
            raise TierError(
                f"tier: expected one of {', '.join(t.name for t in self.tiers)}, found {name!r}; "
                "a local tier is given as TorchaxCheckpointer(directory, local=LocalTier(path))"
            )
        return tiers

    # --- saving ---

    def require_writable(self) -> None:
        """Raises DirectoryError if the directory of a tier must not be written."""
        for tier in self.tiers:
            tier.directory.require_writable()

    def claim(self, step: int | None = None) -> None:
        """Acquires the tiers' leases, unless held; raises if a directory cannot be written."""
        for saver in self:
            saver.tier.claim.acquire(step, functools.partial(close_others, saver))

    def prepare(self, step: int) -> None:
        """Acquires leases and stores the run's name, unless done, on all processes or on none."""
        if not all(tier.claim.is_held for tier in self.tiers):
            self._is_named = False
        self.claim(step)
        if self._is_named:
            return
        # In both tiers: see ``storage/directory/run_identity.py``.
        with self.processes.round("naming the run"):
            durable = self.durable.tier.directory
            if self.local is None:
                self.processes.first(durable.leave_tiers)
            else:
                name = self.processes.first(lambda: uuid.uuid4().hex)
                self.local.tier.directory.join(self.processes.first(durable.runs), name)
                self.processes.meet()
                self.processes.first(lambda: durable.join([], name))
        self._is_named = True

    def announce_new(self) -> None:
        """Says once, if the run has no steps, that it is new."""
        is_known, self._is_announced = self._is_announced, True
        if is_known or self._options.read_only or not self.processes.is_first:
            return
        if not any(tier.history.branches.in_place for tier in self.tiers):
            announce_new(self.durable.path)

    def wait(self, timeout_secs: float | None = None) -> None:
        """Waits until no save is in flight in any tier."""
        if not isinstance(timeout_secs, int | float | None):
            raise ArgumentError(
                f"timeout_secs: expected a number of seconds or None, found {timeout_secs!r:.80}"
            )
        deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
        for saver in self:
            saver.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def check_for_errors(self, kind: type[CheckpointError] = CheckpointError) -> None:
        """Raises the durable tier's oldest unraised failure; if none, the local tier's."""
        for saver in self:
            saver.check_for_errors(kind)

    def open(self) -> None:
        """Lists the steps in the directory of each tier, unless the steps are listed already."""
        if not self._is_open:
            self.close_others()
            _, on_all = self._compare_local_steps()
            for tier in self.tiers:
                tier.history.open()
            self._forget_what_others_lack(on_all)
            self._is_open = True

    def go_on_from(self, step: int | None) -> None:
        """Continues the run from ``step`` (None: from the start), and abandons all newer steps."""
        self.frozen_leaves.forget()
        _, on_all = self._compare_local_steps()
        self.call_log.go_on_from(step)
        for tier in self.tiers:
            tier.history.go_on_from(step)
        self._forget_what_others_lack(on_all)
        self._is_open = True

    def _forget_what_others_lack(self, on_all: set[Key]) -> None:
        """Leaves out local steps that a host lacks, so that all hosts decide alike."""
        if self.local is not None and self.processes.count > 1:
            self.local.tier.history.keep_only(on_all)

    def delete(self, step: int, name: TierName | None = None) -> None:
        """Deletes a step from one tier or all; raises as ``candidates`` does."""
        found = self.candidates(step, name)
        self.claim()  # after the search, so that a missing step does not create a directory
        for saver in self:
            if any(committed.path.parent == saver.path for committed in found):
                saver.delete(step)

    def close_others(self) -> None:
        """Closes collected or half-closed checkpointers of this process that may write here."""
        for saver in self:
            close_others(saver)

    def closing(self, calls: Calls, last: Callable[[], None]) -> Closing:
        """Returns a ``Closing`` that ends the saves, releases leases and then calls ``last``."""
        watch, log = self.processes.liveness, self.call_log

        def end() -> None:
            last()
            watch.remove(log)

        windows = [saver.windows for saver in self]
        return Closing(self._savers, [*windows, self.deadline], calls, end)


def _require_apart(local: epath.Path, durable: epath.Path) -> None:
    if location.is_within(local, durable) or location.is_within(durable, local):
        raise TierError(
            f"LocalTier: path: expected a directory apart from the run's, {durable}, found "
            f"{local}: one is the other, or lies in it. Give the local tier a directory of its "
            "own, on a ramdisk or a local disk of each host",
            path=local,
        )


def announce_new(path: epath.Path) -> None:
    """Logs that a new run begins, as a warning if a run with nearly its name is beside it."""
    text = f"new run in {path}: it has no step to resume from"
    about = fields(step=0, path=path)
    try:
        for sibling in path.parent.iterdir():
            if not names.may_be_mistyped(path.name, sibling.name):
                continue
            if (step := commit_record.newest_in(sibling)) is not None:
                logger.warning(
                    "%s. The run %s, whose name differs by one letter, has step %d: if this run "
                    "was to continue that one, end the program and give it that directory",
                    text,
                    sibling,
                    step,
                    extra=about,
                )
                return
    except Exception as error:  # bucket clients raise errors of their own
        logger.debug("%s: the runs beside it cannot be listed: %s", path, error)
    tell(logger, text, about)
