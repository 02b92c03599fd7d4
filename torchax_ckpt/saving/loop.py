"""The training loop as a checkpointer sees it: its position, the metrics recorded, ``steps()``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torchax_ckpt.errors import StepError
from torchax_ckpt.saving import step_metrics

logger = logging.getLogger(__name__)


class SaveStep(Protocol):
    """Saves a step, as ``TorchaxCheckpointer.save`` does."""

    def __call__(self, step: int, *, force: bool) -> bool:
        """Saves the step if the policy says so, or if it is forced."""


class Loop:
    """One training loop.

    Attributes:
      position: the last step that was saved, restored or completed in ``steps``; None at a start
        without a checkpoint.
    """

    def __init__(self) -> None:
        self.position: int | None = None
        self._num_restores = 0
        self._recorded: dict[str, Any] = {}

    def restored(self, step: int | None) -> None:
        """Goes on from a restored step; metrics recorded before it do not count."""
        self.position = step
        self._num_restores += 1
        self._recorded = {}

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Keeps metrics of the present step until it is saved.

        Raises:
          MetricsError: neither a number nor JSON.
        """
        self._recorded.update(step_metrics.check_metrics(metrics))

    def take_metrics(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the recorded metrics joined with more of them, and forgets what was recorded.

        Raises:
          MetricsError: neither a number nor JSON.
        """
        pending = {**self._recorded, **step_metrics.check_metrics(more)}
        self._recorded = {}
        return pending

    def require_not_passed(self, step: int, path: Any) -> None:
        """Raises StepError if the step is below the position; ``path`` is for the error."""
        if self.position is not None and step < self.position:
            raise StepError(
                f"step {step} is below step {self.position}, the last one saved or restored in "
                "this run; to go back, restore the step to go on from",
                step=step,
                path=path,
            )

    def steps(
        self, total: int, save: SaveStep, reached_preemption: Callable[[], bool]
    ) -> Iterator[int]:
        """Yields the steps up to ``total``, and saves each after its body."""
        step = self.position or 0
        while step < total:
            step = (self.position or 0) + 1
            self._recorded = {}
            num_restores = self._num_restores
            yield step
            if self._num_restores != num_restores:
                # The body went to another step: what is attached is that step's state now.
                step = self.position or 0
                continue
            save(step, force=step == total)
            self.position = step
            if reached_preemption():
                logger.warning("step %d: preempted; ending the loop", step)
                return
