"""Owns the simulation: a run is failed, restored and failed again; where does its time go?

The events are the failures. Between two of them everything is periodic (``schedule``), so a
simulated month costs as much as the failures in it, whatever the number of saves.
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
      kind: what it takes.
    """

    at_secs: float
    kind: FailureKind = "slice"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """Where the time of a simulated run went; the four parts add up to ``duration_secs``.

    Attributes:
      duration_secs: wall time.
      trained_secs: training that was kept, at the speed of steps without saves.
      saving_secs: what saves cost: training blocked, and training slowed down.
      lost_secs: between the snapshot that was restored and the failure.
      down_secs: from failures until training went on.
      num_failures: failures that interrupted the run, or its restart.
      num_local_restores: how many of them were restored from the local tier.
      interval_secs: wall time between saves to the durable tier, undisturbed.
      local_interval_secs: the same for the local tier; None where it was not used.
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
        """The fraction of wall time that became kept training."""
        return self.trained_secs / self.duration_secs


Outcome = SimulatedRun
"""The public name."""


def draw_failures(cluster: Cluster, *, duration_secs: float, seed: int = 0) -> list[Failure]:
    """Independent failures of a cluster: exponential times between them, kinds by their shares.

    Args:
      cluster: how often it fails, and how.
      duration_secs: until when.
      seed: equal seeds give equal failures.

    Raises:
      PlanError: the duration is not positive.
    """
    arguments.positive("duration_secs", duration_secs, "give the seconds to simulate")
    random = np.random.default_rng(seed)
    # A Poisson process, seen over a fixed time: how many there are, and then when.
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
) -> SimulatedRun:
    """Runs a training in simulated time.

    A restart goes on from the newest snapshot that survives: of the local tier if one is left, else
    of the durable tier; without any, from the beginning. A save in flight when something fails is
    lost; if it was one to the durable tier, the first snapshot after the restart goes there.

    Args:
      run: the cluster and its tiers.
      policy: when it saves.
      failures: a trace to replay, by time; None draws one from the cluster and the seed.
      duration_secs: wall time to simulate; None for so long that about 10,000 failures are drawn.
      seed: of the failures that are drawn.

    Raises:
      PlanError: the policy does not fit the run, or the trace is out of order.
    """
    schedule = Schedule(run, policy)
    if duration_secs is None:
        if failures is not None:
            raise PlanError(
                "duration_secs: expected a number, found None, with failures to replay; a trace "
                "does not say how long the run went on after its last failure: give it"
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
    """The state of a run between two failures. Snapshots are numbered from the beginning here."""

    def __init__(self, run: Run, schedule: Schedule, has_local: bool) -> None:
        self._run, self._schedule, self._has_local = run, schedule, has_local
        self._up_since = 0.0  # lies ahead during a restart
        self._restored = 0  # the snapshot this uptime began from
        self._durable = 0  # the newest there; 0 is the beginning, which needs no checkpoint
        self._local: int | None = None
        self._saving_secs = self._lost_secs = self._down_secs = 0.0
        self._num_failures = self._num_local_restores = 0

    def fail(self, failure: Failure) -> None:
        cluster, schedule = self._run.cluster, self._schedule
        uptime_secs = failure.at_secs - self._up_since
        if uptime_secs < 0:
            if not cluster.restart_can_fail:
                return
            self._down_secs += uptime_secs  # this restart ends early
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
        kept = newest - self._restored  # below zero when this uptime began from a lost snapshot
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

    def end(self, duration_secs: float) -> SimulatedRun:
        schedule = self._schedule
        uptime_secs = duration_secs - self._up_since
        trained_secs = self._restored * schedule.training_secs
        if uptime_secs < 0:
            self._down_secs += uptime_secs
        else:
            # Work under way counts, spread evenly over its interval: the run was not interrupted.
            first_durable = self._first_durable()
            m = schedule.last_begun(uptime_secs, first_durable)
            begin_secs = schedule.begin_secs(m, first_durable)
            next_secs = schedule.begin_secs(m + 1, first_durable)
            m_and_part = m + (uptime_secs - begin_secs) / (next_secs - begin_secs)
            trained_secs += m_and_part * schedule.training_secs
            self._saving_secs += uptime_secs - m_and_part * schedule.training_secs
        return SimulatedRun(
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
    """What one policy reaches on a cluster of one size.

    Attributes:
      num_chips: of the cluster.
      policy: its name.
      outcomes: one for each seed; with equal seeds all policies meet the same failures.
    """

    num_chips: int
    policy: str
    outcomes: Sequence[SimulatedRun]

    @property
    def goodput(self) -> float:
        """The median."""
        return statistics.median(outcome.goodput for outcome in self.outcomes)

    @property
    def goodput_range(self) -> tuple[float, float]:
        """The least and the greatest."""
        goodputs = [outcome.goodput for outcome in self.outcomes]
        return min(goodputs), max(goodputs)


def compare(
    run: Run,
    policies: Mapping[str, Policy | TwoTier],
    *,
    num_chips: Sequence[int],
    seeds: Sequence[int] = (0, 1, 2),
) -> list[Comparison]:
    """Simulates policies on clusters of several sizes; what saves cost stays the same.

    Args:
      run: the run; its number of chips is replaced.
      policies: by name.
      num_chips: the sizes.
      seeds: one simulation each, of about 10,000 failures.

    Raises:
      PlanError: a policy does not fit the run, or a size not the hosts.
    """
    compared = []
    for size, (name, policy) in itertools.product(num_chips, policies.items()):
        sized = dataclasses.replace(run, cluster=dataclasses.replace(run.cluster, num_chips=size))
        outcomes = tuple(simulate(sized, policy, seed=seed) for seed in seeds)
        compared.append(Comparison(num_chips=size, policy=name, outcomes=outcomes))
    return compared


def _checked(failures: Iterable[Failure]) -> Iterable[Failure]:
    before = 0.0
    for failure in failures:
        arguments.at_least("at_secs", failure.at_secs, before, "sort the trace by time, from 0 on")
        if failure.kind not in _KINDS:
            raise PlanError(
                f"kind: expected one of {', '.join(_KINDS)}, found {failure.kind!r}; name what "
                f"the failure at {failure.at_secs:g} s took"
            )
        before = failure.at_secs
        yield failure
