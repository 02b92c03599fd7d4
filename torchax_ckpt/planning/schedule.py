"""Computes when snapshots begin and become durable between two failures of a simulated run.

Between two failures, saves are periodic. ``Schedule`` therefore computes the time of any snapshot
by formula and does not step through the earlier snapshots. Snapshots are numbered from the last
restart: 0 is the restored state, and m is the m-th snapshot after the restart. The argument
``first_durable`` is the number of the first snapshot that goes to the durable tier.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from torchax_ckpt.errors import PlanError
from torchax_ckpt.planning import arguments
from torchax_ckpt.planning.runs import Policy, Run, Tier, TwoTier

_ROUNDING = 1e-9  # relative: far above rounding errors of sums, far below any relevant time


class Schedule:
    """Computes the times at which a run saves under a policy.

    The run takes a snapshot after every ``training_secs`` of training at full speed. Every
    ``saves_per_durable``-th snapshot goes to the durable tier; if the durable tier is the only
    tier, every snapshot does.

    Args:
      run: the cluster and its tiers.
      policy: when to save to each tier.

    Attributes:
      training_secs: training at full speed from one snapshot to the next.
      saves_per_durable: number of snapshots from one save to the durable tier to the next.
      interval_secs: wall time from one save to the durable tier to the next, without failures.
      local_interval_secs: wall time from one save to the local tier to the next, without failures
        and saves to the durable tier; None without a local tier.

    Raises:
      PlanError: the policy does not fit the tiers.
    """

    def __init__(self, run: Run, policy: Policy | TwoTier) -> None:
        mtbf_secs = run.cluster.mtbf_secs
        self._durable = run.durable
        self._local: Tier | None = None
        if isinstance(policy, TwoTier):
            if run.local is None:
                raise PlanError("TwoTier: expected a local tier, found None; give Run(local=...)")
            self._local = run.local
            lost = run.cluster.local_loss_fraction
            self.training_secs = _training_secs(run.local, policy.local, mtbf_secs, 1 - lost, run)
            durable_secs = _training_secs(run.durable, policy.durable, mtbf_secs, lost, run)
            wanted = max(1, round(durable_secs / self.training_secs))
            blocking_secs = run.local.blocking_secs
            windows = [(run.local.durable_secs - blocking_secs, run.local.slowdown)]
            self._local_interval = blocking_secs + _wall_secs(self.training_secs, windows)
            self.local_interval_secs: float | None = self._local_interval
        else:
            self.training_secs = _training_secs(run.durable, policy, mtbf_secs, 1, run)
            wanted = 1
            self._local_interval = math.inf  # every snapshot goes to the durable tier
            self.local_interval_secs = None
        # Start times, in seconds, of the snapshots that follow a save to the durable tier while
        # that save is in flight and slows the training. Later snapshots are _local_interval apart.
        self._disturbed = [0.0]
        while self._disturbed[-1] < run.durable.durable_secs * (1 - _ROUNDING):
            self._disturbed.append(self._after(self._disturbed[-1]))
        self._num_disturbed = len(self._disturbed) - 1
        self.saves_per_durable = max(wanted, self._num_disturbed)
        self.interval_secs = self._disturbed[-1]
        if self.saves_per_durable > self._num_disturbed:
            quiet = self.saves_per_durable - self._num_disturbed
            self.interval_secs += quiet * self._local_interval

    def begin_secs(self, m: int, first_durable: int) -> float:
        """Returns the seconds from the restart to the start of snapshot m; 0 if m is 0."""
        if m == 0:
            return 0.0
        # Nothing is in flight after a restart, so the first interval is all training.
        begin_secs = self.training_secs
        if m <= first_durable:
            return begin_secs + _times(m - 1, self._local_interval)
        begin_secs += _times(first_durable - 1, self._local_interval)
        periods, rest = divmod(m - first_durable, self.saves_per_durable)
        disturbed = min(rest, self._num_disturbed)
        begin_secs += periods * self.interval_secs + self._disturbed[disturbed]
        return begin_secs + _times(rest - disturbed, self._local_interval)

    def last_begun(self, secs: float, first_durable: int) -> int:
        """Returns the number of the last snapshot that has begun by a given time; 0 if none.

        Args:
          secs: the given time, in seconds since the restart.
          first_durable: the number of the first snapshot that goes to the durable tier.
        """
        if secs < self.training_secs:
            return 0
        rest = secs - self.begin_secs(first_durable, first_durable)
        if rest < 0:
            return 1 + math.floor((secs - self.training_secs) / self._local_interval)
        periods, rest = divmod(rest, self.interval_secs)
        m = bisect.bisect_right(self._disturbed, rest) - 1
        if m == self._num_disturbed:
            m += math.floor((rest - self._disturbed[m]) / self._local_interval)
        m = min(m, self.saves_per_durable - 1)  # a rounding error must not reach the next period
        return first_durable + int(periods) * self.saves_per_durable + m

    def last_local(self, secs: float, first_durable: int) -> int:
        """Returns the number of the last snapshot committed in the local tier; 0 if none.

        Ignores snapshots that are committed later than ``secs`` seconds after the restart.
        """
        if self._local is None:
            return 0
        return self.last_begun(secs - self._local.durable_secs, first_durable)

    def last_durable(self, secs: float, first_durable: int) -> int:
        """Returns the number of the last snapshot committed in the durable tier; 0 if none.

        Ignores snapshots that are committed later than ``secs`` seconds after the restart.
        """
        begun = secs - self._durable.durable_secs - self.begin_secs(first_durable, first_durable)
        if begun < 0:
            return 0
        return first_durable + int(begun // self.interval_secs) * self.saves_per_durable

    def _after(self, begin_secs: float) -> float:
        """Returns the start time of the snapshot that follows the snapshot begun at ``begin_secs``.

        Both start times are seconds from the start of the latest save to the durable tier.
        """
        tiers = [(self._durable, begin_secs)]
        if self._local is not None:
            tiers.append((self._local, 0.0))
        blocking_secs = sum(tier.blocking_secs for tier, age_secs in tiers if age_secs == 0)
        windows = [(t.durable_secs - age - blocking_secs, t.slowdown) for t, age in tiers]
        return begin_secs + blocking_secs + _wall_secs(self.training_secs, windows)


def _training_secs(
    tier: Tier, policy: Policy, mtbf_secs: float, fraction: float, run: Run
) -> float:
    """Returns the seconds of training between two saves to a tier.

    ``fraction`` is the share of failures after which a restart reads the tier.
    """
    interval_secs = policy.interval_secs(
        tier,
        mtbf_secs=mtbf_secs / fraction if fraction > 0 else math.inf,
        step_secs=run.step_secs,
    )
    if not interval_secs < math.inf:
        raise PlanError(
            f"{type(policy).__name__}: expected a finite interval between saves, found "
            f"{interval_secs!r}. No failure of this cluster makes a restart read the tier of this "
            "policy, so the policy finds no best interval. Use FixedInterval for this tier, or "
            "change process_fraction or cluster_fraction of the Cluster"
        )
    training_secs = max(interval_secs, tier.durable_secs) - tier.cost_secs
    if run.step_secs is not None:  # saves begin between steps
        training_secs = math.ceil(training_secs / run.step_secs - _ROUNDING) * run.step_secs
    arguments.positive(
        f"interval of {type(policy).__name__}",
        training_secs,
        "no time to train is left between two saves; give a longer interval, or step_secs",
    )
    return training_secs


def _wall_secs(training_secs: float, windows: Sequence[tuple[float, float]]) -> float:
    """Returns the wall time that training takes if it is slowed down during given time windows.

    Args:
      training_secs: the time that the training takes at full speed.
      windows: (end in seconds, slowdown) of each window. All windows begin at 0.
    """
    now = 0.0
    for end, _ in sorted(windows):
        if end <= now:
            continue
        factor = 1 + sum(slowdown for other, slowdown in windows if other > now)
        if training_secs * factor <= end - now:
            return now + training_secs * factor
        training_secs -= (end - now) / factor
        now = end
    return now + training_secs


def _times(num: int, interval_secs: float) -> float:
    """Returns ``num * interval_secs``, but 0 if ``num`` is 0 and the interval is infinite."""
    return num * interval_secs if num else 0.0
