"""Owns save decision policies: when a step is saved. Orbax's own where they fit.

``ContinuousCheckpointingPolicy``, ``FixedIntervalPolicy``, ``SpecificStepsPolicy``,
``InitialSavePolicy``, ``PreemptionCheckpointingPolicy``, ``OptimalIntervalPolicy``,
``AnySavePolicy``; any object with their ``should_save`` (``SaveDecisionPolicy``) works. One that
also has ``observe_save(blocking_secs=, durable_secs=)`` is told what each save cost.

On several processes policies are asked on process 0 alone, some steps ahead: see
``decision_windows.py``.

Source: Orbax v1, ``training.save_decision_policies``.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.experimental.v1.training import save_decision_policies as _saving

from torchax_ckpt.errors import PolicyError
from torchax_ckpt.planning import save_cost_secs, young_interval_secs
from torchax_ckpt.policies.step_times import StepTimes

SaveDecisionPolicy: TypeAlias = _saving.SaveDecisionPolicy
DecisionContext: TypeAlias = _saving.DecisionContext
FixedIntervalPolicy = _saving.FixedIntervalPolicy
SpecificStepsPolicy = _saving.SpecificStepsPolicy
InitialSavePolicy = _saving.InitialSavePolicy
PreemptionCheckpointingPolicy = _saving.PreemptionCheckpointingPolicy
AnySavePolicy = _saving.AnySavePolicy

_MULTIPROCESSING = ocp.options.MultiprocessingOptions()


@dataclasses.dataclass(kw_only=True)
class ContinuousCheckpointingPolicy(_saving.ContinuousCheckpointingPolicy):
    """Saves whenever the last save is durable; the shortest interval the storage allows.

    Orbax's own policy takes the number of an operation whenever it is asked, which a save in flight
    takes for its own.

    Attributes:
      minimum_interval_secs: seconds that must lie between the last checkpoint and the next; None
        for none. Some 30 s spare a bucket when the model is small.
    """

    minimum_interval_secs: float | None = None

    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: DecisionContext
    ) -> bool:
        """True unless a save is in flight or the last checkpoint is too recent."""
        if context.is_saving_in_progress:
            return False
        if not previous_steps or self.minimum_interval_secs is None:
            return True
        interval = datetime.timedelta(seconds=self.minimum_interval_secs)
        return step.time - previous_steps[-1].time >= interval


@dataclasses.dataclass(kw_only=True)
class OptimalIntervalPolicy:
    """Saves at the interval that loses the least time, from what saves cost as it runs.

    Every ``max(P, sqrt(2 c M))`` seconds: c is what a save costs the training, P the time until it
    is durable, M the mean time between failures. Saving more often than that costs more than the
    lost work it spares; where c is small, it is as often as storage allows. A save costs the time
    b that it blocks the training thread and, where steps are slower by a fraction s while it is in
    flight, ``(P - b) s / (1 + s)``.

    The slowdown is measured unless it is given: steps with a save in flight against steps without.
    Where saves follow each other without a pause, one in twenty is followed by one as long as a
    save, to have something to compare with.

    Source: Young, "A first order approximation to the optimum checkpoint interval" (1974), with c
    in place of the whole save, since the rest overlaps with training.

    Attributes:
      mtbf_secs: mean time between failures of the whole run, in seconds. It falls in proportion
        to the number of chips.
      slowdown: the fraction by which steps take longer while a save is in flight, 0.05 for 5 %;
        None measures it.
    """

    mtbf_secs: float
    slowdown: float | None = None
    _blocking_secs: list[float] = dataclasses.field(default_factory=list, repr=False)
    _durable_secs: list[float] = dataclasses.field(default_factory=list, repr=False)
    _times: StepTimes = dataclasses.field(
        default_factory=StepTimes, init=False, repr=False, compare=False
    )
    _continuous: ContinuousCheckpointingPolicy = dataclasses.field(
        default_factory=ContinuousCheckpointingPolicy, init=False, repr=False
    )

    def __post_init__(self) -> None:
        if not self.mtbf_secs > 0 or not math.isfinite(self.mtbf_secs):
            raise PolicyError(f"mtbf_secs: expected a positive number, found {self.mtbf_secs!r}")
        if self.slowdown is not None and not 0 <= self.slowdown < math.inf:
            raise PolicyError(
                f"slowdown: expected None or a number from 0 on, found {self.slowdown!r}"
            )

    def observe_save(self, *, blocking_secs: float, durable_secs: float) -> None:
        """Takes what one save cost; the median of the latest five counts."""
        for known, value in (
            (self._blocking_secs, blocking_secs),
            (self._durable_secs, durable_secs),
        ):
            known.append(value)
            del known[:-_OBSERVED]

    @property
    def interval_secs(self) -> float:
        """Seconds from one snapshot to the next; 0 as long as no save was observed."""
        if not self._durable_secs:
            return 0.0
        return young_interval_secs(
            blocking_secs=self.cost_secs, durable_secs=self._durable, mtbf_secs=self.mtbf_secs
        )

    @property
    def cost_secs(self) -> float:
        """Seconds of training that one save costs; 0 as long as none was observed."""
        if not self._blocking_secs:
            return 0.0
        blocking = statistics.median(self._blocking_secs)
        return save_cost_secs(
            blocking_secs=blocking,
            durable_secs=max(blocking, self._durable),
            slowdown=self._times.slowdown if self.slowdown is None else self.slowdown,
        )

    @property
    def _durable(self) -> float:
        return statistics.median(self._durable_secs) if self._durable_secs else 0.0

    @property
    def _pause_secs(self) -> float:
        """How much longer to wait for steps without a save, where they are to be measured."""
        times = self._times
        is_due = times.num_unmatched >= (_SAVES_PER_PAUSE if times.has_quiet else 1)
        # Two steps: one that is whole lies within.
        return max(self._durable, 2 * times.last_secs) if is_due and self.slowdown is None else 0.0

    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: DecisionContext
    ) -> bool:
        """True once the interval has passed since the last snapshot and no save is in flight."""
        self._times.completed(
            step.step,
            step.time.timestamp(),
            is_saving=context.is_saving_in_progress,
            newest_step=previous_steps[-1].step if previous_steps else None,
        )
        # The time of a checkpoint is that of its commit, P after its snapshot.
        secs = max(self.interval_secs - self._durable, self._pause_secs)
        self._continuous.minimum_interval_secs = max(0.0, secs)
        return self._continuous.should_save(step, previous_steps, context=context)


_SAVES_PER_PAUSE = 20
_OBSERVED = 5


def default_save_decision_policy() -> SaveDecisionPolicy:
    """Continuous, and at a preemption."""
    return AnySavePolicy([ContinuousCheckpointingPolicy(), PreemptionCheckpointingPolicy()])


def observers(policy: Any) -> list[Any]:
    """Every policy that wants to be told what saves cost, also inside any-of."""
    return [p for p in _with_children(policy) if callable(getattr(p, "observe_save", None))]


def _with_children(policy: Any) -> Iterator[Any]:
    yield policy
    for child in getattr(policy, "policies", None) or ():
        yield from _with_children(child)


def decision_context(*, is_saving_in_progress: bool, reached_preemption: bool) -> DecisionContext:
    """What a save decision policy is told beside the steps."""
    return DecisionContext(
        is_saving_in_progress=is_saving_in_progress,
        reached_preemption=reached_preemption,
        multiprocessing_options=_MULTIPROCESSING,
    )
