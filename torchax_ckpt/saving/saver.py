"""Begins the saves of one tier, one after another, and decides which steps to save to it.

At exit, the program waits for the save in flight. A failed save leaves earlier steps intact, and
the next save tries again; of failures in a row for one reason, only the first is logged as an
error.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from torchax_ckpt.errors import CheckpointError, DirectoryError
from torchax_ckpt.policies import save_decision
from torchax_ckpt.processes.decision_windows import DecisionWindows
from torchax_ckpt.runtime import background, progress
from torchax_ckpt.runtime.lazily import root_logger_left_alone
from torchax_ckpt.saving.capture import Capture
from torchax_ckpt.saving.run_history import checkpoint_info
from torchax_ckpt.saving.save import Save, round_of
from torchax_ckpt.saving.tier import Tier
from torchax_ckpt.saving.training_loop.deadline import Deadline
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.medium import storage_errors

logger = logging.getLogger(__name__)


class Saver:
    """Begins the saves of a tier. With a ``deadline``, a step may be due because of it."""

    def __init__(self, tier: Tier, deadline: Deadline | None = None) -> None:
        self.tier = tier
        self.path = tier.directory.path
        self._deadline = deadline
        self.windows = DecisionWindows(tier.decisions_channel, self._ask)
        self._observers = save_decision.observers(tier.save_policy)
        self._in_flight: Save | None = None

    # --- decisions ---

    def tell_preemption(self, step: int) -> None:
        """Tells the policy, on process 0, that a step is saved because of a preemption."""
        if not self.tier.decisions_channel.is_first:
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
        is_saving = self.is_saving
        for cost in () if is_saving else self.tier.costs.observed():
            for observer in self._observers:
                observer.observe_save(
                    blocking_secs=cost.blocking_secs, durable_secs=cost.durable_secs
                )
        asked, *decided = (
            checkpoint_info(CommittedStep(n, self.path, time.time_ns())) for n in (step, *coming)
        )
        # Not copied, because this runs at each step and there may be many checkpoints.
        known = self.tier.history.checkpoints()
        context = save_decision.decision_context(
            is_saving_in_progress=is_saving or bool(coming),
            reached_preemption=reached_preemption,
        )
        is_due = self._deadline is not None and self._deadline.needs_save
        if is_due and not reached_preemption:
            return not context.is_saving_in_progress
        with root_logger_left_alone():  # Orbax's policies log
            return self.tier.save_policy.should_save(
                asked, (*known, *decided) if decided else known, context=context
            )

    # --- saves ---

    @property
    def saving_step(self) -> int | None:
        """The step of the save in flight; None if no save is in flight."""
        in_flight = self._in_flight
        return None if in_flight is None or in_flight.ended.is_set else in_flight.step

    @property
    def is_saving(self) -> bool:
        """Whether a save is in flight."""
        return self.saving_step is not None

    @property
    def has_begun(self) -> bool:
        """Whether ``close`` may have work to do: a lease to release, or threads to end."""
        tier = self.tier
        return tier.claim.was_tried or tier.telemetry.has_thread or tier.mirroring.is_claimed

    def begin(self, capture: Capture) -> bool:
        """Waits for the save in flight, if any, then starts a thread that writes ``capture``.

        Returns False if the system refuses the thread: then the save has failed.
        """
        self.wait()
        tier, save = self.tier, Save(self.tier, self.tier.saves_channel.log.publish(), capture)
        try:
            self._in_flight = save
            tier.history.begin(save.step)
            save.start()
            if (limit := tier.options.save_timeout_secs) is not None:
                save.watch(limit)
            if capture.snapshot.way == "transfer" and not save.transferred.wait(
                self._remaining_secs(save)
            ):
                raise save.timeout_error()
            return True
        except BaseException as error:  # also an interrupt, or no thread can be started
            if not save.cancel():  # its thread runs
                raise
            self._refuse(save.step, error)
            tier.telemetry.saving(save.step, capture.began)
            if storage_errors.is_limit(error) and not background.ending.is_set:
                tier.fail(save.step, error, age_secs=save.age_secs)
                return False
            tier.undo(save.step)
            text = str(error) or type(error).__name__
            tier.telemetry.emit("failed", save.step, error=text)
            raise
        finally:
            save.blocking_secs = time.perf_counter() - capture.began
            save.handed_over.set()

    def abstain(self, step: int, error: BaseException) -> None:
        """Makes the save of a step fail on all processes: this process could not begin the save."""
        self._refuse(step, error)
        if not self.is_saving:  # an overdue save is not to be touched
            self.tier.history.begin(step)
            self.tier.fail(step, error)

    def _refuse(self, step: int, error: BaseException) -> None:
        self.tier.saves_channel.refuse(round_of(step), error)

    def wait(self, timeout_secs: float | None = None) -> None:
        """Waits for the save in flight; after a SaveTimeoutError, the save continues."""
        if (in_flight := self._in_flight) is None:
            return
        bounds = [s for s in (timeout_secs, self._remaining_secs(in_flight)) if s is not None]
        if not in_flight.ended.wait(min(bounds, default=None)):
            raise in_flight.timeout_error()

    def join(self) -> None:
        """Waits for the save in flight without a time limit."""
        if self._in_flight is not None:
            self._in_flight.ended.wait()

    def check_for_errors(self, kind: type[CheckpointError] = CheckpointError) -> None:
        """Raises the oldest unraised failure of this class, else SaveTimeoutError once per save."""
        self.tier.failures.raise_oldest(kind)
        in_flight = self._in_flight
        if in_flight is None or in_flight.ended.is_set or in_flight.is_known_overdue:
            return
        if self._remaining_secs(in_flight) == 0:
            in_flight.is_known_overdue = True
            raise in_flight.timeout_error()

    def close(self) -> None:
        """Waits for the save in flight, then releases the lease; keeps it at a SaveTimeoutError."""
        tier = self.tier
        if (in_flight := self._in_flight) is not None:
            what = f"finishing the save of step {in_flight.step}"
            limit = self.tier.options.save_timeout_secs or math.inf
            left_secs = lambda: limit - in_flight.age_secs  # noqa: E731
            progress.wait(in_flight.ended, left_secs, lambda: f"{what}: {in_flight.where()}")
        self.wait()
        for memory in tier.memories:
            memory.free()
        tier.mirroring.close()
        tier.preserving.warn_of_metrics()
        tier.telemetry.close()
        tier.claim.release()

    def _remaining_secs(self, in_flight: Save) -> float | None:
        """Returns the seconds until a save reaches ``save_timeout_secs``; None without a limit."""
        limit = self.tier.options.save_timeout_secs
        return None if limit is None else max(0.0, limit - in_flight.age_secs)

    # --- other steps ---

    def delete(self, step: int) -> None:
        """Deletes a step. Call ``delete`` only while no save is in flight."""
        tier, directory, history = self.tier, self.tier.directory, self.tier.history

        def delete() -> Sequence[CommittedStep]:
            tier.claim.clean_up()
            branches = history.branches
            staying = [s.step for s in branches.abandoned if s.key in directory.staying]
            if staying and branches.committed and branches.committed[-1].step == step:
                raise DirectoryError(
                    f"{self.path}: step {step} lists the steps {staying} as abandoned, and these "
                    "can be neither deleted nor set aside: save a newer step, then delete this one",
                    step=step,
                    path=self.path,
                )
            for committed in directory.steps():  # a local step may be on other hosts only
                if committed.step == step:
                    directory.delete(committed)
            left = [s for s in history.branches.committed if s.step != step]
            tier.telemetry.steps_gone("deleted", [step], left)
            return directory.branches().in_place

        history.refresh(history.found(delete, f"deleting step {step}"))
