"""Save decisions: asks the policy whether to save a step, with one answer for all processes."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence

from torchax_ckpt import policies
from torchax_ckpt.policies import save_decision
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.processes.decision_windows import DecisionWindows
from torchax_ckpt.saving.saver import Saver
from torchax_ckpt.storage.directory.run_history import RunHistory

logger = logging.getLogger(__name__)


class Decisions:
    """Decides which steps to save to one tier, by asking the save decision policy.

    Args:
      policy: the policy to ask.
      history: the steps of the run, which the policy gets.
      saver: knows the costs of saves, and whether a save is in flight.
      processes: the processes of the run, with a channel for save decisions only.
    """

    def __init__(
        self,
        policy: policies.SaveDecisionPolicy,
        history: RunHistory,
        saver: Saver,
        processes: Processes,
    ) -> None:
        self._policy = policy
        self._observers = save_decision.observers(policy)
        self._history = history
        self._saver = saver
        self._is_first = processes.is_first
        self._windows = DecisionWindows(processes, self._ask) if processes.count > 1 else None

    def should_save(self, step: int) -> bool:
        """Returns whether to save the step.

        In a run of several processes, all processes must call ``should_save`` with the same steps
        in the same order. All processes then get the same answer.
        """
        return self._ask(step) if self._windows is None else self._windows.ask(step)

    def tell_preemption(self, step: int) -> None:
        """Tells the policy, on process 0, that a step is saved because of a preemption.

        Calls the policy's ``should_save``, and ignores its answer and its errors: the step is saved
        in any case, because the process may end before another save.
        """
        if not self._is_first:
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

    def begun(self) -> None:
        """Records that the last step for which ``should_save`` was called is now being saved.

        In a run of several processes, ``should_save`` asks the policy once for each step, and
        returns this answer again at further calls for the step; after ``begun``, further calls for
        the step return False. In a run of one process, ``begun`` does nothing, because
        ``should_save`` asks the policy at each call.
        """
        if self._windows is not None:
            self._windows.keep()

    @property
    def has_begun(self) -> bool:
        """Whether the background thread that receives decisions may be running."""
        return self._windows is not None and self._windows.has_begun

    def close(self) -> None:
        """Ends the background thread that receives decisions; may be called more than once."""
        if self._windows is not None:
            self._windows.close()

    def _ask(
        self, step: int, coming: Sequence[int] = (), *, reached_preemption: bool = False
    ) -> bool:
        """Asks the policy whether to save a step, and returns the answer.

        Args:
          step: completed optimizer steps.
          coming: earlier steps that will be saved, but whose saves have not begun.
          reached_preemption: whether the run got a preemption notice.
        """
        while self._saver.finished:
            cost = self._saver.finished.popleft()
            for observer in self._observers:
                observer.observe_save(
                    blocking_secs=cost.blocking_secs, durable_secs=cost.durable_secs
                )
        info = functools.partial(
            policies.CheckpointInfo,
            path=self._history.path,
            metadata=None,
            commit_timestamp_nsecs=time.time_ns(),
        )
        # Not copied, because this runs at each step and there may be many checkpoints.
        known = self._history.checkpoints()
        return self._policy.should_save(
            info(step),
            (*known, *map(info, coming)) if coming else known,
            context=save_decision.decision_context(
                is_saving_in_progress=bool(coming) or self._saver.is_saving,
                reached_preemption=reached_preemption,
            ),
        )
