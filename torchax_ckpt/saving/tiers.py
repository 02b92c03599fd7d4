"""The tiers of a run: its durable directory, and perhaps a local one in front of it.

Each has steps, a history of them, a saver and policies of its own; whatever holds for one holds for
the other. Together they are one run: the newest step of either that was not abandoned is the one to
go on from, the local one of two that are equal, as it is closer.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchax_ckpt import policies
from torchax_ckpt.errors import PolicyError, StepNotFoundError, TierError
from torchax_ckpt.options import CheckpointOptions, LocalTier, TierName
from torchax_ckpt.policies import described, save_decision
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.processes.per_host import PerHostProcesses
from torchax_ckpt.restoring.local_tier import HostSteps
from torchax_ckpt.restoring.step_reader import Source, StoredLeaves
from torchax_ckpt.saving.closing import Closing, take_over
from torchax_ckpt.saving.decisions import Decisions
from torchax_ckpt.saving.saver import Saver
from torchax_ckpt.storage.arrays import orbax_context
from torchax_ckpt.storage.directory import run_identity
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.directory.run_history import RunHistory
from torchax_ckpt.telemetry.events import Event
from torchax_ckpt.telemetry.recorder import Telemetry


@dataclasses.dataclass(frozen=True)
class RunTier:
    """One place for steps.

    Attributes:
      name: which it is.
      directory: where the steps are.
      history: which of them are this run's.
      saver: writes them.
      decisions: when.
      telemetry: is told what happens.
      processes: those of the run, as they speak of this tier on their training threads.
    """

    name: TierName
    directory: RunDirectory
    history: RunHistory
    saver: Saver
    decisions: Decisions
    telemetry: Telemetry
    processes: Processes


class Tiers:
    """The tiers of a run; iterating yields them, the durable one first.

    Args:
      directory: of the durable tier.
      save_decision_policy, preservation_policy: of the durable tier.
      local: the local tier, if there is one.
      options: how steps are written and read.
      on_event: is told what happens in the durable tier.
      on_donated: called when a save failed because a reference was donated.

    Attributes:
      processes: those of the run, as its training threads speak to them.
      durable: the durable tier.
      local: the local tier, or None.

    Raises:
      PolicyError: a policy is none.
      TierError: a local tier that cannot be restored as the options say.
      DirectoryError: a directory cannot be one.
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
        self.processes, saves = (
            self._conversation(f"{kind} {durable.path}") for kind in ("calls", "saves")
        )
        self._tiers: list[RunTier] = []
        self.durable = self._tier(
            "durable", durable, save_decision_policy, preservation_policy, self.processes, saves
        )
        self._tiers.append(self.durable)
        self.local: RunTier | None = None
        self._is_open = self._is_named = False
        self._name = run_identity.new()
        if local is not None:
            if options.restore_in_budget and self.processes.count > 1:
                raise TierError(
                    "on several processes a local tier is restored together, and restore_in_budget "
                    "takes leaves in parts that differ between processes: give one of the two"
                )
            saves = self._conversation(f"local saves {durable.path}")
            self._replica_axis = local.replica_axis
            self.local = self._tier(
                "local",
                RunDirectory(local.path, read_only=options.read_only, durable=durable),
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
        save_policy = save_policy or save_decision.default_save_decision_policy()
        for policy, method in ((save_policy, "should_save"), (keep_policy, "should_preserve")):
            if not callable(getattr(policy, method, None)):
                raise PolicyError(f"{policy!r:.100} is no policy: it has no method {method}()")
        history = RunHistory(directory, calls, None if name == "durable" else self.durable.history)
        on_event = self._on_event if name == "durable" else None
        telemetry = Telemetry(directory, on_event, described.described(keep_policy))
        saver = Saver(
            directory,
            history,
            keep_policy,
            self._options,
            telemetry,
            calls,
            saves,
            self._on_donated,
        )
        place = self._tiers[0].directory if self._tiers else directory
        agreed = self._conversation(f"{name} decisions {place.path}")
        decisions = Decisions(save_policy, history, saver, agreed)
        return RunTier(name, directory, history, saver, decisions, telemetry, calls)

    def __iter__(self) -> Iterator[RunTier]:
        return iter(self._tiers)

    def _conversation(self, about: str) -> Processes:
        """The processes of the run, as they speak to each other about one thing."""
        service = orbax_context.coordination_service()
        return Processes(about, self._options.process_timeout_secs, service)

    # --- the steps there are ---

    def candidates(
        self, step: int | None = None, name: TierName | None = None
    ) -> list[CommittedStep]:
        """Steps to read, the best one last: the newest, and of two that are equal the local one.

        Args:
          step: only those of this number.
          name: only those in this tier.

        Raises:
          StepNotFoundError: there are none.
          TierError: there is no such tier.
        """
        found = self.steps(name)
        if chosen := [s for s in found if step is None or s.step == step]:
            return chosen
        where = " and ".join(str(tier.directory.path) for tier in self._asked(name))
        text = f"{where}: there are no checkpoints"
        if step is not None:
            there = ", ".join(map(str, sorted({s.step for s in found}))) or "none"
            text = f"{where}: no checkpoint at step {step}; there are: {there}"
        raise StepNotFoundError(text, step=step, path=self._asked(name)[0].directory.path)

    def steps(self, name: TierName | None = None) -> list[CommittedStep]:
        """As ``candidates``, perhaps none."""
        asked, near = self._asked(name), self._compared()
        found = []
        for tier in asked:
            if tier is self.local and self.processes.count > 1:
                found += [near[key] for key in sorted(near)]
            else:
                found += tier.history.found(tier.directory.steps)
        return sorted(found, key=lambda s: s.step)  # which keeps the tiers of one step in order

    def find(self, step: int) -> CommittedStep:
        """A step that this process finds, the local one first; asks no other process."""
        for tier in reversed(self._tiers[1:]):
            if step in (s.step for s in tier.directory.steps()):
                return tier.directory.find(step)
        return self.durable.directory.find(step)

    def _compared(self) -> dict[tuple[int, int], CommittedStep]:
        """The steps that any host has in its local tier, as they lie on this one, if they do.

        Tells the directories what other hosts know to be abandoned, and the history of the local
        tier what not all hosts have.
        """
        if self.local is None or self.processes.count == 1:
            return {}
        directory = self.local.directory
        with self.processes.round("comparing local steps"):
            mine = {s.key: s for s in directory.steps()}
            told = directory.abandonment.told(mine.values())
            keys = directory.abandonment.learn(self.local.processes.gather(told))
        self._on_all, there = set.intersection(*keys), set.union(*keys)
        # Under a name that nothing has: another step may lie here under its number.
        elsewhere = {
            (step, at): CommittedStep(step, directory.path / f"{step}-on-another-host", at)
            for step, at in there - mine.keys()
        }
        return {key: mine[key] for key in there & mine.keys()} | elsewhere

    def opened(self, committed: CommittedStep) -> Source:
        """A step as it can be read. In a round.

        Raises:
          ForeignCheckpointError, CorruptCheckpointError: it cannot.
        """
        tier = self.holding(committed)
        if isinstance(tier.processes, PerHostProcesses) and tier.processes.is_per_host:
            return HostSteps(
                committed,
                self._options,
                self.processes.index,
                tier.processes,
                self._replica_axis,
                tier.directory.verified,
            )
        return StoredLeaves(committed, self._options, self.processes.meet)

    def numbers(self, name: TierName | None = None) -> list[int]:
        """The numbers of the steps that this process finds, in order; asks no other process."""
        return sorted({s.step for tier in self._asked(name) for s in tier.directory.steps()})

    def holding(self, committed: CommittedStep) -> RunTier:
        """The tier that a step is in."""
        return next(t for t in self._tiers if t.directory.path == committed.path.parent)

    def _asked(self, name: TierName | None) -> list[RunTier]:
        asked = [tier for tier in self._tiers if name in (None, tier.name)]
        if not asked:
            raise TierError(
                f"tier: expected one of {', '.join(t.name for t in self._tiers)}, found {name!r}; "
                "a local tier is given as TorchaxCheckpointer(directory, local=LocalTier(path))"
            )
        return asked

    # --- saving ---

    def claim(self, step: int | None = None) -> None:
        """Makes sure, before the first save, that all can be written, and takes them."""
        for tier in self._tiers:
            tier.saver.claim(step)

    def prepare(self, step: int, tiers: Sequence[RunTier]) -> None:
        """Makes sure that some of the tiers can take a step, and have none in flight."""
        if not all(tier.saver.is_claimed for tier in self._tiers):
            self._name, self._is_named = run_identity.new(), False
        self.claim(step)
        if not self._is_named:
            self._name_run()
        for tier in tiers:
            tier.saver.wait()

    def _name_run(self) -> None:
        """Names the run: a local tier that misses its steps does not count; ``run_identity.py``."""
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

    def wait(self, timeout_secs: float | None = None) -> None:
        """Waits until no save is in flight."""
        deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
        for tier in self._tiers:
            tier.saver.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def check_for_errors(self) -> None:
        """Raises the oldest failure of a tier's saves that nobody has read yet, once."""
        for tier in self._tiers:
            tier.saver.check_for_errors()

    def open(self) -> None:
        """Lists the directories, if that has not been done yet."""
        if not self._is_open:
            self.take_over()
            self._compared()
            for tier in self._tiers:
                tier.history.open()
            self._forget_what_others_lack()
            self._is_open = True

    def go_on_from(self, step: int | None) -> None:
        """The run goes on from this step (None: from the start); newer ones are abandoned."""
        self._compared()
        for tier in self._tiers:
            tier.history.go_on_from(step)
        self._forget_what_others_lack()
        self._is_open = True

    def _forget_what_others_lack(self) -> None:
        """So that all hosts decide alike what to save."""
        if self.local is not None and self.processes.count > 1:
            self.local.history.keep_only(self._on_all)

    def delete(self, step: int, name: TierName | None = None) -> None:
        """Deletes a step from the tiers that have it; raises as ``candidates`` does."""
        found = self.candidates(step, name)
        self.claim()  # only now: a step that is not there creates no directory
        for committed in found:
            self.holding(committed).saver.delete(step)

    def take_over(self) -> None:
        """Ends checkpointers of this process on the same directories that nobody uses any more."""
        for tier in self._tiers:
            take_over(tier.saver)

    def closing(self, last: Callable[[], None]) -> Closing:
        """What finishes the saves in flight and lets others write; then calls ``last``."""
        stops = [tier.decisions.close for tier in self._tiers]
        return Closing([tier.saver for tier in self._tiers], stops, last)
