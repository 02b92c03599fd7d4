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
    """Decides, in ``windows``, which steps to save to one tier, on a channel for this only."""

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
        self.windows = DecisionWindows(processes, self._ask)

    def tell_preemption(self, step: int) -> None:
        """Tells the policy, on process 0, that a step is saved because of a preemption."""
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

    def _ask(
        self, step: int, coming: Sequence[int] = (), *, reached_preemption: bool = False
    ) -> bool:
        """Returns the policy's answer; the saves of steps ``coming`` are decided, not begun."""
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
