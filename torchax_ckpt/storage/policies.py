"""Owns policies: when a step is saved and which steps are kept. Orbax's own where they fit.

Save decisions: ``ContinuousCheckpointingPolicy``, ``FixedIntervalPolicy``, ``SpecificStepsPolicy``,
``InitialSavePolicy``, ``PreemptionCheckpointingPolicy``, ``OptimalIntervalPolicy``,
``AnySavePolicy``; any object with their ``should_save`` (``SaveDecisionPolicy``) works. One that
also has ``observe_save(blocking_secs=, durable_secs=)`` is told what each save cost.

Preservation: ``PreserveAll``, ``LatestN``, ``EveryNSteps``, ``EveryNSeconds``, ``LatestDuration``,
``CustomSteps``, ``BestN``, ``AnyPreservationPolicy``; any object with their ``should_preserve``
(``PreservationPolicy``) works. Whatever a rule says, the newest step is never deleted.

On several processes policies are asked on process 0 alone, and save decisions some steps ahead: see
``appointments.py``.

Source: Orbax v1, ``training.save_decision_policies`` and ``training.preservation_policies``.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.experimental.v1.training import preservation_policies as _preserving
from orbax.checkpoint.experimental.v1.training import save_decision_policies as _saving

from torchax_ckpt.errors import PolicyError
from torchax_ckpt.planning import save_cost_secs, young_interval_secs
from torchax_ckpt.storage.slowdown import StepTimes

SaveDecisionPolicy: TypeAlias = _saving.SaveDecisionPolicy
DecisionContext: TypeAlias = _saving.DecisionContext
FixedIntervalPolicy = _saving.FixedIntervalPolicy
SpecificStepsPolicy = _saving.SpecificStepsPolicy
InitialSavePolicy = _saving.InitialSavePolicy
PreemptionCheckpointingPolicy = _saving.PreemptionCheckpointingPolicy
AnySavePolicy = _saving.AnySavePolicy

PreservationPolicy: TypeAlias = _preserving.PreservationPolicy
PreservationContext: TypeAlias = _preserving.PreservationContext
PreserveAll = _preserving.PreserveAll
LatestN = _preserving.LatestN
EveryNSteps = _preserving.EveryNSteps
EveryNSeconds = _preserving.EveryNSeconds
LatestDuration = _preserving.LatestDuration
CustomSteps = _preserving.CustomSteps
AnyPreservationPolicy = _preserving.AnyPreservationPolicy

_MULTIPROCESSING = ocp.options.MultiprocessingOptions()

CheckpointInfo = ocp.training.CheckpointMetadata
"""What policies see of a step: ``step``, ``time`` (aware datetime, UTC) and ``metrics``."""

__all__ = [
    "AnyPreservationPolicy",
    "AnySavePolicy",
    "BestN",
    "CheckpointInfo",
    "ContinuousCheckpointingPolicy",
    "CustomSteps",
    "DecisionContext",
    "EveryNSeconds",
    "EveryNSteps",
    "FixedIntervalPolicy",
    "InitialSavePolicy",
    "LatestDuration",
    "LatestN",
    "OptimalIntervalPolicy",
    "PreemptionCheckpointingPolicy",
    "PreservationContext",
    "PreservationPolicy",
    "PreserveAll",
    "SaveDecisionPolicy",
    "SpecificStepsPolicy",
]


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestN:
    """Keeps the n best steps by a metric, and nothing else; combine it with ``LatestN``.

    Attributes:
      metric: the name it was saved under: ``save(step, metrics={"loss": loss})``.
      mode: whether small ("min") or large ("max") is good.
      n: how many to keep.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    n: int = 1

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise PolicyError(f"BestN: mode must be 'min' or 'max', found {self.mode!r}")
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise PolicyError(f"BestN: n must be a positive int, found {self.n!r}")

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: PreservationContext
    ) -> list[bool]:
        """True for the n best; of equals, for the newest."""
        best = {id(c) for c in self.ranked(checkpoints)[: self.n]}
        return [id(c) in best for c in checkpoints]

    def ranked(self, checkpoints: Sequence[Any]) -> list[Any]:
        """The checkpoints that have the metric, best first; NaN ranks nothing."""
        scored = [(v, c) for c in checkpoints if (v := self._value(c)) is not None]
        sign = 1 if self.mode == "min" else -1
        return [c for _, c in sorted(scored, key=lambda vc: (sign * vc[0], -vc[1].step))]

    def _value(self, checkpoint: Any) -> float | None:
        value = (checkpoint.metrics or {}).get(self.metric)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            return None
        return value


def default_save_decision_policy() -> SaveDecisionPolicy:
    """Continuous, and at a preemption."""
    return AnySavePolicy([ContinuousCheckpointingPolicy(), PreemptionCheckpointingPolicy()])


def default_preservation_policy() -> PreservationPolicy:
    """The latest three."""
    return LatestN(3)


def best_rules(policy: Any) -> Iterator[BestN]:
    """Every best-N rule in a policy, also inside any-of."""
    return (rule for rule in _with_children(policy) if isinstance(rule, BestN))


def observers(policy: Any) -> list[Any]:
    """Every policy that wants to be told what saves cost, also inside any-of."""
    return [p for p in _with_children(policy) if callable(getattr(p, "observe_save", None))]


def _with_children(policy: Any) -> Iterator[Any]:
    yield policy
    for child in getattr(policy, "policies", None) or ():
        yield from _with_children(child)


def preserved(policy: Any, checkpoints: Sequence[Any], is_damaged: Sequence[bool]) -> list[bool]:
    """What is kept of the checkpoints, oldest first: by the policy, and always the newest.

    Raises:
      PolicyError: as ``answered``.
    """
    keep = answered(policy, checkpoints, is_damaged)
    newest = len(keep) - 1
    newest_sound = max((i for i, damaged in enumerate(is_damaged) if not damaged), default=newest)
    return [kept or i in (newest, newest_sound) for i, kept in enumerate(keep)]


def answered(policy: Any, checkpoints: Sequence[Any], is_damaged: Sequence[bool]) -> list[bool]:
    """What the policy keeps of the checkpoints, oldest first.

    It keeps a damaged one as if that were sound, which takes no place from those that are.

    Raises:
      PolicyError: the policy answered something else than one bool for each.
    """
    if not checkpoints:
        return []
    answer = list(policy.should_preserve(checkpoints, context=PreservationContext()))
    if len(answer) != len(checkpoints):
        raise PolicyError(
            f"{type(policy).__name__}.should_preserve answered {len(answer)} values for "
            f"{len(checkpoints)} checkpoints; nothing was deleted"
        )
    if any(is_damaged):
        sound = [c for c, damaged in zip(checkpoints, is_damaged, strict=True) if not damaged]
        among = iter(answered(policy, sound, [False] * len(sound)))
        answer = [
            kept if damaged else next(among)
            for kept, damaged in zip(answer, is_damaged, strict=True)
        ]
    return [bool(kept) for kept in answer]


def decision_context(*, is_saving_in_progress: bool, reached_preemption: bool) -> DecisionContext:
    """What a save decision policy is told beside the steps."""
    return DecisionContext(
        is_saving_in_progress=is_saving_in_progress,
        reached_preemption=reached_preemption,
        multiprocessing_options=_MULTIPROCESSING,
    )
