"""The state of a training loop: its last step, its recorded metrics, its ``steps()`` iterator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchax_ckpt.errors import StepError
from torchax_ckpt.saving import step_metrics

logger = logging.getLogger(__name__)


class Loop:
    """The position and the recorded metrics of one training loop.

    ``position`` is the last step saved, restored or completed; None without a checkpoint.
    """

    def __init__(self) -> None:
        self.position: int | None = None
        self._num_restores = 0
        self._recorded: dict[str, Any] = {}

    def restored(self, step: int | None) -> None:
        """Sets the loop's position to a restored step, and discards the recorded metrics."""
        self.position = step
        self._num_restores += 1
        self._recorded = {}

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Keeps metrics of the current step for the next ``save``, which stores or drops them."""
        self._recorded.update(step_metrics.check_metrics(metrics))

    def take_metrics(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """Returns and clears the recorded metrics, updated with ``more``."""
        pending = {**self._recorded, **step_metrics.check_metrics(more)}
        self._recorded = {}
        return pending

    def require_not_passed(self, step: int, path: Any) -> None:
        """Raises StepError if ``step`` is below the last step saved, restored or completed."""
        if self.position is not None and step < self.position:
            raise StepError(
                f"step {step} is below step {self.position}, the last step saved or restored in "
                "this run; to go back, call restore(step) for the step to continue from",
                step=step,
                path=path,
            )

    def steps(
        self, total: int, save: Callable[..., bool], reached_preemption: Callable[[], bool]
    ) -> Iterator[int]:
        """Yields the steps after ``position`` up to ``total``, and saves each after the loop body.

        A body that restored a step is not saved; the restored step's successor is next. After a
        preemption notice, the iteration ends with the save.
        """
        step = self.position or 0
        if step >= total:
            logger.info("steps(%d) has nothing to do: step %d is completed", total, step)
        while step < total:
            step = (self.position or 0) + 1
            self._recorded = {}
            num_restores = self._num_restores
            try:
                yield step
            except GeneratorExit:  # the body ended the loop, which let go of this iterator
                self._recorded = {}
                raise
            if self._num_restores != num_restores:  # the attached state is that of another step
                step = self.position or 0
                continue
            save(step, force=step == total)
            self.position = step
            if reached_preemption():
                logger.info("step %d: preempted; ending the loop", step)
                return
