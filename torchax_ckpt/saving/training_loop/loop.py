"""The state of a training loop: its last step, its recorded metrics, its ``steps()`` iterator."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torchax_ckpt.errors import ArgumentError, StepError
from torchax_ckpt.runtime import user_messages
from torchax_ckpt.saving.training_loop import step_metrics
from torchax_ckpt.state import findings
from torchax_ckpt.storage.directory.committed_step import MAX_STEP

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Measured:
    """Whether the newest step that ``is_due`` was asked about has a ranked metric."""

    step: int | None = None
    has_ranked: bool = True
    had_ranked: bool = True  # whether the step before has one


def saving(save: Callable[..., bool], state: Callable[[], Any] | None) -> Callable[..., bool]:
    """Returns ``save``, or one that stores what ``state`` returns; ArgumentError for another."""
    if state is None:
        return save
    if not callable(state):
        raise ArgumentError(
            "state: expected a function that returns the state to save, such as lambda: state, "
            f"found {findings.type_name(state)}"
        )
    return functools.partial(save, state=lambda: state())


class Loop:
    """The position and the recorded metrics of one training loop.

    ``position`` is the last step saved, restored or completed; None without a checkpoint.
    """

    def __init__(self) -> None:
        self.position: int | None = None
        self._num_restores = 0
        self._recorded: dict[str, Any] = {}
        # The step of the newest ``save`` and its metrics, for another ``save`` of this step.
        self._saved: tuple[int | None, Mapping[str, Any]] = None, {}
        self._measured = _Measured()
        # The restored step, if it has a functional state, which only ``load`` returns; and the
        # steps of which ``load`` has returned such a state, or a part of it, since one was saved.
        self._functional: int | None = None
        self._loaded: collections.deque[int] = collections.deque(maxlen=100)

    def restored(self, step: int | None) -> None:
        """Sets the loop's position to a restored step, and discards the recorded metrics.

        Without a checkpoint, ``step`` is None, and the training begins before step 1.
        """
        self.position = step
        self._num_restores += 1
        self._recorded, self._saved = {}, (None, {})
        # So that the first step is not due.
        self._measured = dataclasses.replace(self._measured, step=step or 0, has_ranked=True)

    def restored_from(self, step: int, *, is_functional: bool) -> None:
        """Says whether a restored step has a functional state."""
        self._functional = step if is_functional else None

    def loaded(self, step: int) -> None:
        """Says that ``load`` has returned the functional state of a step, or a part of it."""
        self._loaded.append(step)

    def warn_of_unloaded(self) -> None:
        """Warns, once, if a functional state is saved that cannot continue that of the restored."""
        step, self._functional = self._functional, None
        if step is not None and step not in self._loaded:
            user_messages.warn(
                f"step {step}, from which this run goes on, has a state that was saved with "
                "save(state=) or steps(state=), and this checkpointer has not loaded it. Unless "
                "the program has read it in another way, the steps that are saved now do not "
                f"continue it: read it with load({step}) after attach or restore"
            )
        self._loaded.clear()

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Keeps metrics of the current step for the next ``save``, which stores or drops them."""
        self._recorded.update(step_metrics.check_metrics(metrics))

    def metrics(self, step: int) -> dict[str, Any]:
        """Returns the metrics that a ``save`` of this step stores without metrics of its own."""
        saved_step, saved = self._saved
        kept = step_metrics.checked_again(saved, step) if saved_step == step else {}
        return {**kept, **self._recorded}

    def take_metrics(self, step: int, more: Mapping[str, Any]) -> dict[str, Any]:
        """Returns and clears the metrics of ``step``, updated with ``more``."""
        pending = {**self.metrics(step), **step_metrics.check_metrics(more)}
        self._recorded, self._saved = {}, (None, {})
        return pending

    def keep_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keeps the metrics of a declined save, or of one that may fail, for the next one."""
        self._saved = step, metrics

    def is_due(self, step: int, metrics: Mapping[str, Any], ranked: Sequence[str]) -> bool:
        """Returns whether a step has a metric of those ``ranked``, and the step before has none."""
        if not ranked:
            return False
        known = self._measured
        if step != known.step:
            is_next = known.step in (None, step - 1)  # None: this is the first step
            known = _Measured(step, has_ranked=False, had_ranked=is_next and known.has_ranked)
        found = [metrics[name] for name in ranked if metrics.get(name) is not None]
        self._measured = dataclasses.replace(known, has_ranked=known.has_ranked or bool(found))
        return not known.had_ranked and any(map(step_metrics.may_rank, found))

    def follows(self, step: int) -> None:
        """Says that the program asks at every step, although the numbers rise by more than one."""
        if self._measured.step is not None and self._measured.step < step:
            self._measured = dataclasses.replace(self._measured, step=step - 1)

    @property
    def measures_every_step(self) -> bool:
        """Whether the newest two steps have a ranked metric: then the next is not due either."""
        return self._measured.has_ranked and self._measured.had_ranked

    def require_next(self, step: int, path: Any) -> None:
        """Raises StepError for a step too large, or below the last saved, restored or completed."""
        if step > MAX_STEP:
            raise StepError(
                f"step: expected at most {MAX_STEP} (2**63 - 1), found {step:#x}, which no reader "
                "would list. Count completed optimizer steps",
                step=step,
                path=path,
            )
        if self.position is not None and step < self.position:
            raise StepError(
                f"step {step} is below step {self.position}, the last step saved or restored in "
                "this run; to go back, call restore(step) for the step to continue from",
                step=step,
                path=path,
            )

    def steps(
        self,
        total: int,
        save: Callable[..., bool],
        reached_preemption: Callable[[], bool],
        reached_deadline: Callable[[], bool],
    ) -> Iterator[int]:
        """Yields the steps after ``position`` up to ``total``, and saves each after the loop body.

        A body that restored a step is not saved; the restored step's successor is next. After a
        preemption notice or before a deadline, the iteration ends with the save.
        """
        step = self.position or 0
        if step >= total:
            logger.info("steps(%d) has nothing to do: step %d is completed", total, step)
        while step < total and not reached_deadline():
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
