"""Save decisions: what the policy says of a step, and on several processes that they agree."""

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
    """The save decisions of one run.

    Args:
      policy: whom to ask.
      history: the steps of the run, as the policy sees them.
      saver: what saves have cost, and whether one is in flight.
      processes: of the run, for a conversation about nothing else.
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
        """Whether to save a step now; the same on every process, if each asks at the same steps."""
        return self._ask(step) if self._windows is None else self._windows.ask(step)

    def tell_preemption(self, step: int) -> None:
        """Asks the policy of a step that is saved because the run was told to end.

        Where policies are asked, on process 0. The answer decides nothing, and a policy that raises
        does not keep the step from being saved: there may be no later one.
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
        """The step that was asked for last is being saved; asked for again, it is not."""
        if self._windows is not None:
            self._windows.keep()

    def close(self) -> None:
        """Ends the thread that hears of decisions; may be called again."""
        if self._windows is not None:
            self._windows.close()

    def _ask(
        self, step: int, coming: Sequence[int] = (), *, reached_preemption: bool = False
    ) -> bool:
        """What the policy says of a step, before which those coming are to be saved."""
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
        known = self._history.checkpoints()  # not copied: there may be many, and this is every step
        return self._policy.should_save(
            info(step),
            (*known, *map(info, coming)) if coming else known,
            context=save_decision.decision_context(
                is_saving_in_progress=bool(coming) or self._saver.is_saving,
                reached_preemption=reached_preemption,
            ),
        )
