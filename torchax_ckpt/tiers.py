"""Owns the tiers of a run: its durable directory, and perhaps a local one in front of it.

Each has steps, a history of them, a saver and policies of its own; whatever holds for one holds for
the other. Together they are one run: the newest step of either that was not abandoned is the one to
go on from, the local one of two that are equal, as it is closer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from torchax_ckpt.errors import PolicyError, StepNotFoundError, TierError
from torchax_ckpt.history import History
from torchax_ckpt.options import CheckpointOptions, LocalTier, TierName
from torchax_ckpt.saving import Saver
from torchax_ckpt.storage import policies
from torchax_ckpt.storage.directory import CommittedStep, StepDirectory
from torchax_ckpt.storage.processes import Processes
from torchax_ckpt.writing import Capture


@dataclasses.dataclass(frozen=True)
class Tier:
    """One place for steps.

    Attributes:
      name: which it is.
      directory: where the steps are.
      history: which of them are this run's.
      saver: writes them.
      save_policy: when.
    """

    name: TierName
    directory: StepDirectory
    history: History
    saver: Saver
    save_policy: Any

    def is_due(self, step: int) -> bool:
        """Whether the policy says to save this step, which is not there yet, now."""
        while self.saver.finished:
            cost = self.saver.finished.pop(0)
            for observer in policies.observers(self.save_policy):
                observer.observe_save(
                    blocking_secs=cost.blocking_secs, durable_secs=cost.durable_secs
                )
        info = policies.CheckpointInfo(
            step, self.directory.path, metadata=None, commit_timestamp_nsecs=time.time_ns()
        )
        return self.save_policy.should_save(
            info,
            self.history.checkpoints(),
            context=policies.decision_context(
                is_saving_in_progress=self.saver.is_saving, reached_preemption=False
            ),
        )


class Tiers:
    """The tiers of a run.

    Args:
      directory: of the durable tier.
      save_decision_policy, preservation_policy: of the durable tier.
      local: the local tier, if there is one.
      options: how steps are written and read.
      on_donated: called when a save failed because a reference was donated.

    Attributes:
      processes: those of the run, as its training threads speak to them.
      durable: the durable tier.

    Raises:
      PolicyError: a policy is none.
      DirectoryError: a directory cannot be one.
    """

    def __init__(
        self,
        directory: Any,
        save_decision_policy: Any,
        preservation_policy: Any,
        local: LocalTier | None,
        options: CheckpointOptions,
        on_donated: Callable[[], None],
    ) -> None:
        self._options = options
        self._on_donated = on_donated
        durable = StepDirectory(directory, read_only=options.read_only)
        self.processes, saves = (
            Processes(f"{kind} {durable.path}", options.process_timeout_secs)
            for kind in ("calls", "saves")
        )
        history = History(durable, self.processes)
        self.durable = self._tier(
            "durable", durable, history, save_decision_policy, preservation_policy, saves
        )
        self._tiers = [self.durable]
        if local is not None:
            near = StepDirectory(local.path, read_only=options.read_only, durable=durable)
            self._tiers.append(
                self._tier(
                    "local",
                    near,
                    History(near, self.processes, history),
                    local.save_decision_policy,
                    policies.LatestN(local.keep),
                    Processes(f"local saves {durable.path}", options.process_timeout_secs),
                )
            )

    def _tier(
        self,
        name: TierName,
        directory: StepDirectory,
        history: History,
        save_policy: Any,
        keep_policy: Any,
        saves: Processes,
    ) -> Tier:
        save_policy = save_policy or policies.default_save_decision_policy()
        for policy, method in ((save_policy, "should_save"), (keep_policy, "should_preserve")):
            if not callable(getattr(policy, method, None)):
                raise PolicyError(f"{policy!r:.100} is no policy: it has no method {method}()")
        saver = Saver(
            directory, history, keep_policy, self._options, self.processes, saves, self._on_donated
        )
        return Tier(name, directory, history, saver, save_policy)

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
        found = [s for t in self._asked(name) for s in t.history.found(t.directory.steps)]
        return sorted(found, key=lambda s: s.step)  # which keeps the tiers of one step in order

    def numbers(self, name: TierName | None = None) -> list[int]:
        """The numbers of the steps that this process finds, in order; asks no other process."""
        return sorted({s.step for tier in self._asked(name) for s in tier.directory.steps()})

    def holding(self, committed: CommittedStep) -> Tier:
        """The tier that a step is in."""
        return next(t for t in self._tiers if t.directory.path == committed.path.parent)

    def _asked(self, name: TierName | None) -> list[Tier]:
        asked = [tier for tier in self._tiers if name in (None, tier.name)]
        if not asked:
            raise TierError(
                f"tier: expected one of {', '.join(t.name for t in self._tiers)}, found {name!r}; "
                "a local tier is given as TorchaxCheckpointer(directory, local=LocalTier(path))"
            )
        return asked

    # --- saving ---

    def due(self, step: int) -> list[Tier]:
        """The tiers that lack the step, and whose policies say to save it now."""
        for tier in self._tiers:
            tier.history.open()
        return [t for t in self._tiers if not t.history.has(step) and t.is_due(step)]

    def claim(self) -> None:
        """Makes sure, before the first save, that all can be written, and takes them."""
        for tier in self._tiers:
            tier.saver.claim()

    def begin(self, capture: Capture, tiers: Sequence[Tier]) -> None:
        """Starts to write a capture to some of the tiers, at the same time."""
        for tier in tiers:
            tier.saver.begin(capture)
            # A problem with the metrics is one problem, however often they are written.
            alone = functools.partial(_without_problem, capture.fetch_metrics)
            capture = dataclasses.replace(capture, fetch_metrics=alone)

    def wait(self, timeout_secs: float | None = None) -> None:
        """Waits until no save is in flight."""
        deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
        for tier in self._tiers:
            tier.saver.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def check_for_errors(self) -> None:
        """Raises the oldest failure of a tier's saves that nobody has read yet, once."""
        for tier in self._tiers:
            tier.saver.check_for_errors()

    def go_on_from(self, step: int | None) -> None:
        """The run goes on from this step (None: from the start); newer ones are abandoned."""
        for tier in self._tiers:
            tier.history.go_on_from(step)

    def delete(self, step: int, name: TierName | None = None) -> None:
        """Deletes a step from the tiers that have it; raises as ``candidates`` does."""
        found = self.candidates(step, name)
        self.claim()  # only now: a step that is not there creates no directory
        for committed in found:
            self.holding(committed).saver.delete(step)

    def close(self) -> None:
        """Finishes the saves in flight, and lets others write."""
        with contextlib.ExitStack() as closing:  # each, whatever another raises
            for tier in self._tiers:
                closing.callback(tier.saver.close)


def _without_problem(fetch_metrics: Callable[[], Any]) -> tuple[dict[str, Any], None]:
    metrics, _ = fetch_metrics()
    return metrics, None
