"""A run: its tiers, the channel between its processes, its name, and where it continues from.

The durable tier is the run's directory; a local one, on a disk of each host, gets more frequent
saves. Both work alike, each with its own steps, saves and policies. The run resumes from its newest
step that is not abandoned; if both tiers have it, from the local tier, which is closer.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from torchax_ckpt import policies
from torchax_ckpt.errors import ArgumentError, CheckpointError, MirrorError, TierError
from torchax_ckpt.layout import names
from torchax_ckpt.options import CheckpointOptions, LocalTier, Mirror, TierName
from torchax_ckpt.policies import preservation, preservation_rules
from torchax_ckpt.processes.coordination import Processes, open_channel
from torchax_ckpt.processes.per_host import PerHostProcesses
from torchax_ckpt.runtime.call_guard import Calls
from torchax_ckpt.runtime.preemption import Preemption
from torchax_ckpt.runtime.user_messages import fields, tell
from torchax_ckpt.saving.claim import Claim
from torchax_ckpt.saving.closing import Closing, close_others
from torchax_ckpt.saving.failures import Failures
from torchax_ckpt.saving.mirroring import resuming
from torchax_ckpt.saving.mirroring.mirror_directory import mirror_settings
from torchax_ckpt.saving.mirroring.mirroring import Mirroring
from torchax_ckpt.saving.preserving import Preserving
from torchax_ckpt.saving.reuse.frozen_leaves import FrozenLeaves
from torchax_ckpt.saving.reuse.reuse import Reuse
from torchax_ckpt.saving.run_history import RunHistory
from torchax_ckpt.saving.saver import Saver
from torchax_ckpt.saving.tier import Tier
from torchax_ckpt.saving.tiers import Tiers
from torchax_ckpt.saving.training_loop.deadline import Deadline
from torchax_ckpt.snapshot.snapshotter import Snapshotter
from torchax_ckpt.storage.directory import commit_record, committed_step
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.lineage import Branch, Start
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import location, medium
from torchax_ckpt.telemetry.events import Event
from torchax_ckpt.telemetry.recorder import Telemetry

logger = logging.getLogger(__name__)


class Run:
    """What one checkpointer works on; iteration yields the savers, that of the durable tier first.

    Raises PolicyError, TierError, MirrorError and DirectoryError.
    """

    def __init__(
        self,
        directory: Any,
        rules: tuple[Any, Any],
        local: LocalTier | None,
        mirror: str | os.PathLike[str] | Mirror | None,
        options: CheckpointOptions,
        on_event: Callable[[Event], None] | None,
    ) -> None:
        self._options, self._on_event = options, on_event
        self.preemption = Preemption(options.preemption_grace_secs)
        self.snapshotter = Snapshotter(options.snapshot, options.layout)
        durable = RunDirectory(directory, read_only=options.read_only)
        durable.require_run()
        path = durable.path
        others = [path]
        if local is not None:
            others.append(epath.Path(location.on_this_host("LocalTier: path", local.path)))
        self._mirror = mirror_settings(mirror, others, read_only=options.read_only)
        self.processes = open_channel(f"calls {path}", options.process_timeout_secs)
        self.call_log = self.processes.log
        self.processes.liveness.add(self.call_log)
        saves = self._connect(f"saves {path}")
        self.frozen_leaves = FrozenLeaves(options.reuse, self.processes)
        self.deadline = Deadline(
            self._connect(f"deadline {path}"),
            options.deadline,
            options.deadline_margin_secs,
            self._longest_secs,
        )
        self._histories: list[RunHistory] = []
        tier = self._tier("durable", durable, *rules, self.processes, saves)
        self.durable = Saver(tier, self.deadline)
        self.local: Saver | None = None
        self._savers = [self.durable]
        self._is_open = self._is_named = self._is_announced = False
        if local is not None:
            self._add_local(local)
        self.tiers = Tiers([saver.tier for saver in self._savers], self.processes)

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
        mirroring = Mirroring(
            None if is_local else self._mirror,
            directory.path,
            lambda: Branch(
                history.on_storage(),
                directory.lineage,
                directory.left,
                directory.verified.is_damaged,
            ),
            telemetry.emit,
            self.preemption,
        )
        preserving = Preserving(
            directory, keep_policy, options, saves, is_local=is_local, holds=mirroring.holds
        )
        is_single = is_local and keep_policy.n == 1  # two copies would take more space
        reuse = Reuse(
            directory,
            history,
            preserving,
            saves,
            self.frozen_leaves,
            has_two_copies=not is_single and medium.of(directory.path).num_copies > 1,
        )
        return Tier(
            name=name,
            directory=directory,
            save_policy=save_policy,
            options=options,
            telemetry=telemetry,
            calls_channel=calls,
            saves_channel=saves,
            decisions_channel=self._connect(f"{name} decisions {self._histories[0].path}"),
            history=history,
            claim=Claim(directory, history, telemetry, calls),
            preserving=preserving,
            mirroring=mirroring,
            reuse=reuse,
            failures=Failures(directory.path, telemetry, is_local=is_local),
            on_donated=self.snapshotter.donated,
        )

    def _longest_secs(self) -> float | None:
        """Returns the longest time until a step was safe, in the mirror too if there is one."""
        tier = self.durable.tier
        longest = tier.costs.longest_secs
        return None if longest is None else longest + tier.mirroring.copy_secs

    def __iter__(self) -> Iterator[Saver]:
        return iter(self._savers)

    def _connect(self, channel: str) -> Processes:
        return open_channel(channel, self._options.process_timeout_secs, self.call_log)

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
        """Joins the mirror, acquires leases, stores the run's name and start, unless done.

        Each of these is done on all processes or on none.
        """
        self.join_mirror(resumes=True, may_fetch=False)
        if not all(tier.claim.is_held for tier in self.tiers):
            self._is_named = False
        self.claim(step)
        self._record_start(step)
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

    # --- the mirror ---

    def join_mirror(self, *, resumes: bool, may_fetch: bool = True) -> None:
        """Takes the mirror's lease, and fetches its newest step if the run continues from it.

        Compares the steps of both if the run ``resumes``; a save (``may_fetch=False``) only once.
        Raises LeaseError, and as ``resuming.join`` does.
        """
        mirroring, directory = self.durable.tier.mirroring, self.durable.tier.directory
        if (mirror := self._mirror) is None or (mirroring.is_joined and not may_fetch):
            return
        with self.processes.round("taking the mirror"):
            self.close_others()
            self.processes.first(mirroring.mirror.claim)
        self.claim()
        here = self.tiers.branch()
        with self.processes.round("joining the mirror"):
            token = self.processes.first(lambda: directory.token)
            if not directory.is_leased_by(token):
                raise MirrorError(
                    f"mirror: expected one directory that all processes share, found that process "
                    f"{self.processes.index} has a {directory.path} of its own, of which process 0 "
                    "would copy its part only. Give gs://bucket/prefix as the directory, and "
                    "local=LocalTier(...) for frequent saves",
                    path=directory.path,
                )
            if resumes:
                places = here, mirroring.mirror.directory, directory
                self.processes.first_at_length(
                    lambda: resuming.join(*places, mirror.on_conflict, may_fetch=may_fetch)
                )
        mirroring.is_joined = True

    def fetch_again(self, damaged: CommittedStep, *, or_older: bool) -> CommittedStep | None:
        """Has a damaged step replaced by that of the mirror, if it is intact there; returns it.

        Otherwise, with ``or_older``, fetches and returns a step of the mirror that led to it, if
        one is newer than all sound steps here. Returns None without either.
        """
        tier = self.durable.tier
        if not tier.mirroring.is_joined or self.tiers.holding(damaged) is not tier:
            return None
        directory, found = tier.directory, list[CommittedStep]()
        here = self.tiers.branch() if or_older else None

        def fetch() -> None:
            there = tier.mirroring.mirror.directory
            step = resuming.fetch_again(damaged, there, directory)
            if step is None and here is not None:
                step = resuming.fetch_before(damaged, there, directory, here)
            found.extend([] if step is None else [step])

        with self.processes.round("fetching a damaged step again"):
            self.processes.first_at_length(fetch)
            raw = self.processes.first(lambda: committed_step.to_json(found))
        again = next(iter(committed_step.from_json(raw, directory.path)), None)
        if again is not None and again.key == damaged.key and not self.processes.is_first:
            directory.forget(damaged)  # as process 0 has
        return again

    def _record_start(self, step: int) -> None:
        """Has the run's next steps, from ``step`` on, record what led to them."""
        if self._histories[0].start.lineage:
            return

        def started() -> list[Any]:
            steps = [s for tier in self.tiers for s in tier.history.branches.committed]
            before = self.tiers.branch_of(s for s in steps if s.step < step)
            mirroring = self.durable.tier.mirroring
            there = mirroring.mirror.branch if mirroring.is_claimed else None
            start = Start.after(before, step, there)
            return [start.lineage, start.left]

        with self.processes.round("naming the start"):
            found = Start.from_json(self.processes.first(started))
        for history in self._histories:
            history.start = found

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
            _, on_all = self.tiers.compare_local_steps()
            for tier in self.tiers:
                tier.history.open()
            self._forget_what_others_lack(on_all)
            self._is_open = True

    def go_on_from(self, step: int | None) -> None:
        """Continues the run from ``step`` (None: from the start), and abandons all newer steps."""
        self.frozen_leaves.forget()
        _, on_all = self.tiers.compare_local_steps()
        self.call_log.go_on_from(step)
        for tier in self.tiers:
            tier.history.go_on_from(step)
        leaving = {number for tier in self.tiers for number in tier.history.leaving}
        if leaving and self.processes.is_first:
            logger.info(
                "%s: the run goes on from step %s; its next durable save abandons steps %s",
                self.durable.path,
                step or 0,
                sorted(leaving),
                extra=fields(step=step or 0, path=self.durable.path, steps=sorted(leaving)),
            )
        self._forget_what_others_lack(on_all)
        self._is_open = True
        for history in self._histories:
            history.start = Start()
        self.durable.tier.mirroring.wake()

    def _forget_what_others_lack(self, on_all: set[Key]) -> None:
        """Leaves out local steps that a host lacks, so that all hosts decide alike."""
        if self.local is not None and self.processes.count > 1:
            self.local.tier.history.keep_only(on_all)

    def delete(self, step: int, name: TierName | None = None) -> None:
        """Deletes a step from one tier or all; raises as ``Tiers.candidates`` does."""
        found = self.tiers.candidates(step, name)
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
    if location.overlap(local, durable):
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
