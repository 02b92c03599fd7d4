"""Simulates a training run that fails and restarts, and adds up how the run spent its time.

Saves between two failures are periodic, so the simulation computes their effect by formula
(``schedule``) and only steps from failure to failure. The time to compute a simulated month
therefore depends on the number of failures in that month, not on the number of saves.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, get_args

import numpy as np

from torchax_ckpt.errors import PlanError
from torchax_ckpt.planning import arguments
from torchax_ckpt.planning.runs import Cluster, FailureKind, Policy, Run, TwoTier
from torchax_ckpt.planning.schedule import Schedule

_NUM_FAILURES = 10_000
_KINDS: tuple[FailureKind, ...] = get_args(FailureKind)


class Failure(NamedTuple):
    """One failure of a run.

    Attributes:
      at_secs: wall time since the run began.
      kind: what the failure destroys.
    """

    at_secs: float
    kind: FailureKind = "slice"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a simulation, which says how the simulated run spent its wall time.

    Attributes:
      duration_secs: wall time, which is the sum of ``trained_secs``, ``saving_secs``, ``lost_secs``
        and ``down_secs``.
      trained_secs: training that was kept, at the speed of steps without saves.
      saving_secs: the cost of saves: time in which training was blocked or slowed down.
      lost_secs: time from each snapshot that was restored to the failure that made it necessary.
      down_secs: time from failures until training continued.
      num_failures: failures that interrupted the run or its restart.
      num_local_restores: number of failures after which the local tier was read.
      interval_secs: wall time between saves to the durable tier, without failures.
      local_interval_secs: wall time between saves to the local tier, without failures; None if the
        local tier was not used.
    """

    duration_secs: float
    trained_secs: float
    saving_secs: float
    lost_secs: float
    down_secs: float
    num_failures: int
    num_local_restores: int
    interval_secs: float
    local_interval_secs: float | None

    @property
    def goodput(self) -> float:
        """The fraction of wall time spent on training that no failure undid."""
        return self.trained_secs / self.duration_secs


def draw_failures(cluster: Cluster, *, duration_secs: float, seed: int = 0) -> list[Failure]:
    """Draws random, independent failures of a cluster and returns them in order of time.

    The times between failures are exponentially distributed. The kind of each failure is random;
    the cluster gives the probability of each kind.

    Args:
      cluster: how often it fails, and how.
      duration_secs: the time span in which failures are drawn.
      seed: equal seeds give equal failures.

    Raises:
      PlanError: the duration is not positive.
    """
    arguments.positive("duration_secs", duration_secs, "give the seconds to simulate")
    random = np.random.default_rng(seed)
    # A Poisson process over a fixed time: first the number of failures, then their times.
    num_failures = random.poisson(duration_secs / cluster.mtbf_secs)
    times = np.sort(random.uniform(0, duration_secs, num_failures))
    shares = np.cumsum([cluster.process_fraction, cluster.cluster_fraction])
    order: tuple[FailureKind, ...] = ("process", "cluster", "slice")
    kinds = np.searchsorted(shares, random.uniform(size=num_failures), side="right")
    return [Failure(t, order[k]) for t, k in zip(times.tolist(), kinds.tolist(), strict=True)]


def simulate(
    run: Run,
    policy: Policy | TwoTier,
    *,
    failures: Iterable[Failure] | None = None,
    duration_secs: float | None = None,
    seed: int = 0,
) -> Outcome:
    """Simulates a training run with failures and returns how the run spent its time.

    A restart continues from the newest snapshot that survived the failure. The restart reads the
    local tier if that tier still has this snapshot, otherwise the durable tier. If no snapshot
    survived, the run starts again from the beginning. A save that is in flight when a failure
    happens is lost. If a save to the durable tier is lost and the restart reads the local tier, the
    first snapshot after the restart goes to the durable tier.

    Args:
      run: the cluster and its tiers.
      policy: when the run saves.
      failures: a trace to replay, sorted by time; None draws one from the cluster and the seed.
      duration_secs: wall time to simulate; None simulates about 10,000 drawn failures.
      seed: seed of the drawn failures.

    Raises:
      PlanError: the policy does not fit the run, or the trace is out of order.
    """
    schedule = Schedule(run, policy)
    if duration_secs is None:
        if failures is not None:
            raise PlanError(
                "simulate: duration_secs: expected the length of the run in seconds, found None; "
                "a trace of failures does not say how long the run continued after the last "
                "failure, so give duration_secs together with failures"
            )
        duration_secs = _NUM_FAILURES * run.cluster.mtbf_secs
    arguments.positive("duration_secs", duration_secs, "give the seconds to simulate")
    if failures is None:
        failures = draw_failures(run.cluster, duration_secs=duration_secs, seed=seed)
    clock = _Clock(run, schedule, has_local=isinstance(policy, TwoTier))
    for failure in _checked(failures):
        if failure.at_secs >= duration_secs:
            break
        clock.fail(failure)
    return clock.end(duration_secs)


class _Clock:
    """The state of a simulated run, which ``fail`` advances from one failure to the next.

    ``_Clock`` numbers snapshots from the start of the run, not from the last restart.
    """

    def __init__(self, run: Run, schedule: Schedule, has_local: bool) -> None:
        self._run, self._schedule, self._has_local = run, schedule, has_local
        self._up_since = 0.0  # in the future during a restart
        self._restored = 0  # the snapshot from which this uptime began
        self._durable = 0  # the newest durable snapshot; 0 is the initial state
        self._local: int | None = None
        self._saving_secs = self._lost_secs = self._down_secs = 0.0
        self._num_failures = self._num_local_restores = 0

    def fail(self, failure: Failure) -> None:
        cluster, schedule = self._run.cluster, self._schedule
        uptime_secs = failure.at_secs - self._up_since
        if uptime_secs < 0:
            if not cluster.restart_can_fail:
                return
            self._down_secs += uptime_secs  # the failure cuts this restart short
            uptime_secs = 0.0
        self._num_failures += 1
        first_durable = self._first_durable()
        if m := schedule.last_durable(uptime_secs, first_durable):
            self._durable = self._restored + m
        if m := schedule.last_local(uptime_secs, first_durable):
            self._local = self._restored + m
        if not cluster.local_survives(failure.kind):
            self._local = None
        is_local = self._local is not None and self._local >= self._durable
        newest = self._local if is_local and self._local is not None else self._durable
        # Negative if the snapshot that this uptime began from is lost.
        kept = newest - self._restored
        begin_secs = schedule.begin_secs(max(kept, 0), first_durable)
        self._saving_secs += begin_secs - max(kept, 0) * schedule.training_secs
        self._lost_secs += uptime_secs - begin_secs + max(-kept, 0) * schedule.training_secs
        tier = self._run.local if is_local else self._run.durable
        assert tier is not None
        restart_secs = cluster.restart_secs + tier.restore_secs
        self._num_local_restores += is_local
        self._down_secs += restart_secs
        self._up_since = failure.at_secs + restart_secs
        self._restored = newest

    def end(self, duration_secs: float) -> Outcome:
        schedule = self._schedule
        uptime_secs = duration_secs - self._up_since
        trained_secs = self._restored * schedule.training_secs
        if uptime_secs < 0:
            self._down_secs += uptime_secs
        else:
            # The unfinished interval counts in proportion, because nothing interrupted the run.
            first_durable = self._first_durable()
            m = schedule.last_begun(uptime_secs, first_durable)
            begin_secs = schedule.begin_secs(m, first_durable)
            next_secs = schedule.begin_secs(m + 1, first_durable)
            m_and_part = m + (uptime_secs - begin_secs) / (next_secs - begin_secs)
            trained_secs += m_and_part * schedule.training_secs
            self._saving_secs += uptime_secs - m_and_part * schedule.training_secs
        return Outcome(
            duration_secs=duration_secs,
            trained_secs=trained_secs,
            saving_secs=self._saving_secs,
            lost_secs=self._lost_secs,
            down_secs=self._down_secs,
            num_failures=self._num_failures,
            num_local_restores=self._num_local_restores,
            interval_secs=schedule.interval_secs,
            local_interval_secs=schedule.local_interval_secs,
        )

    def _first_durable(self) -> int:
        due = self._durable + self._schedule.saves_per_durable
        return max(1, due - self._restored)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The simulated runs of one policy on a cluster of one size, one run for each seed.

    Attributes:
      num_chips: number of chips of the cluster.
      policy: name of the policy.
      outcomes: one simulated run for each seed. Equal seeds give all policies the same failures.
    """

    num_chips: int
    policy: str
    outcomes: Sequence[Outcome]

    @property
    def goodput(self) -> float:
        """The median goodput of the simulated runs."""
        return statistics.median(outcome.goodput for outcome in self.outcomes)

    @property
    def goodput_range(self) -> tuple[float, float]:
        """The lowest and the highest goodput of the simulated runs."""
        goodputs = [outcome.goodput for outcome in self.outcomes]
        return min(goodputs), max(goodputs)


def compare(
    run: Run,
    policies: Mapping[str, Policy | TwoTier],
    *,
    num_chips: Sequence[int],
    seeds: Sequence[int] = (0, 1, 2),
) -> list[Comparison]:
    """Simulates every policy on every cluster size; saves and restores cost the same at all sizes.

    Args:
      run: the run; its number of chips is replaced.
      policies: name -> policy.
      num_chips: the sizes of the clusters.
      seeds: seeds of the drawn failures. Each seed gives one simulation of about 10,000 failures.

    Raises:
      PlanError: a policy does not fit the run, or the slices of a size would not all have the same
        number of whole hosts.
    """
    compared = []
    for size, (name, policy) in itertools.product(num_chips, policies.items()):
        sized = dataclasses.replace(run, cluster=dataclasses.replace(run.cluster, num_chips=size))
        outcomes = tuple(simulate(sized, policy, seed=seed) for seed in seeds)
        compared.append(Comparison(num_chips=size, policy=name, outcomes=outcomes))
    return compared


def _checked(failures: Iterable[Failure]) -> Iterable[Failure]:
    previous_secs = 0.0
    for failure in failures:
        arguments.at_least(
            "at_secs", failure.at_secs, previous_secs, "sort the trace by time, beginning at 0"
        )
        if failure.kind not in _KINDS:
            raise PlanError(
                f"simulate: failure at {failure.at_secs:g} s: kind: expected one of "
                f"{', '.join(_KINDS)}, found {failure.kind!r}; correct this failure in the trace"
            )
        previous_secs = failure.at_secs
        yield failure
