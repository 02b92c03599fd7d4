"""Save decision policies, which decide when a step is saved. Most are Orbax's.

Any object with the method ``should_save`` of ``SaveDecisionPolicy`` is a valid policy. If it also
has the method ``observe_save(blocking_secs=, durable_secs=)``, this is called with the cost of each
save. Only process 0 calls policies, usually before the training has reached the step in question
(see ``processes/decision_windows.py``).

Source: Orbax v1, ``training.save_decision_policies``.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import math
import statistics
from collections.abc import Sequence
from typing import Any, TypeAlias

from torchax_ckpt.errors import PolicyError
from torchax_ckpt.policies.closed_forms import save_cost_secs, young_interval_secs
from torchax_ckpt.policies.preservation import with_children
from torchax_ckpt.runtime.lazily import orbax

DecisionContext: TypeAlias = orbax.v1.training.save_decision_policies.DecisionContext

_MULTIPROCESSING = orbax.v1.options.MultiprocessingOptions()
_SAVES_PER_PAUSE = 20
_OBSERVED = 5


@dataclasses.dataclass
class _Stretch:
    """Steps that follow each other; ``first`` and ``last`` are a time in seconds and a step."""

    kind: tuple[bool, int | None]
    first: tuple[float, int]
    last: tuple[float, int]


class StepTimes:
    """The average step times of a run, measured separately with and without a save in flight."""

    def __init__(self) -> None:
        self._stretch: _Stretch | None = None
        self._saving: collections.deque[float] = collections.deque(maxlen=_OBSERVED)
        self._quiet: collections.deque[float] = collections.deque(maxlen=_OBSERVED)
        self.last_secs = 0.0  # the time of the latest step
        self.num_unmatched = 0  # stretches with a save in flight since the latest one without

    def completed(
        self, step: int, now_secs: float, *, is_saving: bool, newest_step: int | None
    ) -> None:
        """Records a completed step; a new ``newest_step`` (saved or in flight) ends the stretch."""
        kind, at, stretch = (is_saving, newest_step), (now_secs, step), self._stretch
        if stretch is not None and step == stretch.last[1] and kind == stretch.kind:
            return  # a repeated call for the same step
        if stretch is not None and step > stretch.last[1]:
            self.last_secs = (now_secs - stretch.last[0]) / (step - stretch.last[1])
            if kind == stretch.kind:
                stretch.last = at
                return
        self._end()
        self._stretch = _Stretch(kind, at, at)

    def _end(self) -> None:
        if self._stretch is None:
            return
        (began_secs, first), (ended_secs, last) = self._stretch.first, self._stretch.last
        if last <= first or ended_secs <= began_secs:
            return
        is_saving, _ = self._stretch.kind
        times = self._saving if is_saving else self._quiet
        times.append((ended_secs - began_secs) / (last - first))
        self.num_unmatched = self.num_unmatched + 1 if is_saving else 0

    @property
    def has_quiet(self) -> bool:
        """Whether the time of steps without a save in flight was measured at least once."""
        return bool(self._quiet)

    @property
    def slowdown(self) -> float:
        """The fraction by which a save in flight lengthens steps; 0 until both kinds are timed."""
        if not self._saving or not self._quiet:
            return 0.0
        return max(0.0, statistics.median(self._saving) / statistics.median(self._quiet) - 1)


@dataclasses.dataclass(kw_only=True)
class ContinuousCheckpointingPolicy(
    orbax.v1.training.save_decision_policies.ContinuousCheckpointingPolicy
):
    """Saves as soon as the last save is durable: at the shortest interval that the storage allows.

    Attributes:
      minimum_interval_secs: the least number of seconds between two checkpoints; None for no limit.
        About 30 s reduce the load on a bucket if the model is small.
    """

    # Each call of Orbax's policy of this name increments the counter of its saves and loads, and
    # Orbax may then take the new number for that of a save in flight. This class never calls it.
    minimum_interval_secs: float | None = None

    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: DecisionContext
    ) -> bool:
        """Returns False during a save and for the minimum interval after a commit, else True."""
        if context.is_saving_in_progress:
            return False
        if not previous_steps or self.minimum_interval_secs is None:
            return True
        interval = datetime.timedelta(seconds=self.minimum_interval_secs)
        return step.time - previous_steps[-1].time >= interval


@dataclasses.dataclass(kw_only=True)
class OptimalIntervalPolicy:
    """Saves at the interval at which saves and failures together cost the least training time.

    The interval is ``max(P, sqrt(2 c M))`` seconds, where c is the cost of a save to the training,
    P the time until the save is durable, and M the mean time between failures. The cost c is the
    time b for which a save blocks the training thread, plus ``(P - b) s / (1 + s)`` if steps take
    longer by a fraction s while a save is in flight. If c is small, the policy saves as often as
    the storage allows.

    Unless ``slowdown`` is given, the policy measures it: it compares steps with a save in flight
    and steps without. If saves follow each other without a pause, it waits for about the time of a
    save, after the first and then after every twentieth save, and measures steps without a save
    meanwhile.

    Source: Young, "A first order approximation to the optimum checkpoint interval" (1974), with c
    in place of the time of the whole save, since the rest of that time overlaps with training.

    Attributes:
      mtbf_secs: mean time between failures of the whole run, inversely proportional to its chips.
      slowdown: the fraction by which steps take longer while a save is in flight, 0.05 for 5 %;
        None measures it.
    """

    mtbf_secs: float
    slowdown: float | None = None

    def __post_init__(self) -> None:
        self._blocking_secs: collections.deque[float] = collections.deque(maxlen=_OBSERVED)
        self._durable_secs: collections.deque[float] = collections.deque(maxlen=_OBSERVED)
        self._times = StepTimes()
        self._continuous = ContinuousCheckpointingPolicy()
        if not self.mtbf_secs > 0 or not math.isfinite(self.mtbf_secs):
            raise PolicyError(f"mtbf_secs: expected a positive number, found {self.mtbf_secs!r}")
        if self.slowdown is not None and not 0 <= self.slowdown < math.inf:
            raise PolicyError(
                f"slowdown: expected None or a number of 0 or more, found {self.slowdown!r}"
            )

    def observe_save(self, *, blocking_secs: float, durable_secs: float) -> None:
        """Records the cost of one save; the policy uses the median of the latest five saves."""
        self._blocking_secs.append(blocking_secs)
        self._durable_secs.append(durable_secs)

    @property
    def interval_secs(self) -> float:
        """The intended seconds between two snapshots; 0 until a save is observed."""
        if not self._durable_secs:
            return 0.0
        return young_interval_secs(
            blocking_secs=self.cost_secs, durable_secs=self._durable, mtbf_secs=self.mtbf_secs
        )

    @property
    def cost_secs(self) -> float:
        """Seconds of training that one save costs; 0 until a save is observed."""
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
        """Seconds to wait after a save, to time steps without a save; 0 if that is not due."""
        times = self._times
        is_due = times.num_unmatched >= (_SAVES_PER_PAUSE if times.has_quiet else 1)
        # At least two steps, because the pause then contains one whole step.
        return max(self._durable, 2 * times.last_secs) if is_due and self.slowdown is None else 0.0

    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: DecisionContext
    ) -> bool:
        """Returns whether no save is in flight, and the interval and a due wait are both over."""
        self._times.completed(
            step.step,
            step.time.timestamp(),
            is_saving=context.is_saving_in_progress,
            newest_step=previous_steps[-1].step if previous_steps else None,
        )
        # The time of a checkpoint is its commit time, which is P after its snapshot.
        secs = max(self.interval_secs - self._durable, self._pause_secs)
        self._continuous.minimum_interval_secs = max(0.0, secs)
        return self._continuous.should_save(step, previous_steps, context=context)


def observers(policy: Any) -> list[Any]:
    """Returns the policies with a method ``observe_save``, including those in ``AnySavePolicy``."""
    return [p for p in with_children(policy) if callable(getattr(p, "observe_save", None))]


def decision_context(*, is_saving_in_progress: bool, reached_preemption: bool) -> DecisionContext:
    """Returns the ``DecisionContext`` to pass to the method ``should_save`` of a policy."""
    return DecisionContext(
        is_saving_in_progress=is_saving_in_progress,
        reached_preemption=reached_preemption,
        multiprocessing_options=_MULTIPROCESSING,
    )
