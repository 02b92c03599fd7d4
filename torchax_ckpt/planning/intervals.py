"""Formulas for the best interval between saves, and for the goodput to expect at an interval.

T: wall time from one snapshot to the next. b: time that a save blocks training. P: time from the
snapshot to the commit. M: mean time between failures. R: time from a failure until training
continues. s: the fraction by which steps take longer while a save is in flight. Failures are a
Poisson process. A save costs b + (P - b) s / (1 + s) seconds of training (``save_cost_secs``),
which ``best_interval`` and ``expected_goodput`` put in place of every b.
"""

from __future__ import annotations

import dataclasses
import math

from torchax_ckpt.errors import PlanError
from torchax_ckpt.planning import arguments

_MTBF_HINT = "give the mean time between failures of the whole run in seconds"


def save_cost_secs(*, blocking_secs: float, durable_secs: float, slowdown: float = 0.0) -> float:
    """Returns the seconds of training that one save costs by blocking and slowing the training.

    Args:
      blocking_secs: b, seconds that the save blocks the training thread.
      durable_secs: P, seconds from the snapshot to the commit.
      slowdown: s, the fraction by which steps take longer while the save is in flight.

    Raises:
      PlanError: a time is negative, or P is less than b.
    """
    hint = "give the seconds that one save blocks training"
    arguments.at_least("blocking_secs", blocking_secs, 0, hint)
    arguments.at_least(
        "durable_secs",
        durable_secs,
        blocking_secs,
        f"it lasts from the snapshot to the commit, so it includes the {blocking_secs:g} s of "
        "blocking_secs; both are equal if saves are synchronous",
    )
    arguments.at_least("slowdown", slowdown, 0, "0.05: steps take 5 % longer during a save")
    return blocking_secs + (durable_secs - blocking_secs) * slowdown / (1 + slowdown)


def young_interval_secs(
    *, blocking_secs: float, mtbf_secs: float, durable_secs: float = 0.0
) -> float:
    """Returns Young's interval, max(P, sqrt(2 b M)), a first-order estimate of the best interval.

    Arguments as for ``best_interval``; b is what a save costs. Source: Young, "A first order
    approximation to the optimum checkpoint interval" (1974).
    """
    return max(durable_secs, math.sqrt(2 * blocking_secs * mtbf_secs))


def daly_training_secs(*, blocking_secs: float, mtbf_secs: float) -> float:
    """Returns the best seconds of training from the end of one save's blocking to the next save.

    Source: Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps"
    (2006), equation 37. Daly's dump time is the blocking time here: the rest of an asynchronous
    save overlaps with training, and changes the goodput, but not the best interval.

    Args:
      blocking_secs: b, seconds of training that a save costs.
      mtbf_secs: M, mean time between failures of the whole run.

    Raises:
      PlanError: a time is not finite, ``blocking_secs`` is negative, or ``mtbf_secs`` not positive.
    """
    arguments.at_least("blocking_secs", blocking_secs, 0, "give the seconds that one save blocks")
    arguments.positive("mtbf_secs", mtbf_secs, _MTBF_HINT)
    if blocking_secs >= 2 * mtbf_secs:  # beyond the range in which the series holds
        return mtbf_secs
    ratio = blocking_secs / (2 * mtbf_secs)
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return math.sqrt(2 * blocking_secs * mtbf_secs) * series - blocking_secs


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestInterval:
    """The best interval between saves.

    Attributes:
      interval_secs: T, wall time from one snapshot to the next.
      is_continuous: whether it is best to begin each save as soon as the previous one is durable.
    """

    interval_secs: float
    is_continuous: bool


def best_interval(
    *,
    blocking_secs: float,
    mtbf_secs: float,
    durable_secs: float | None = None,
    slowdown: float = 0.0,
) -> BestInterval:
    """Returns the best interval: Daly's interval, or ``durable_secs`` (P) if that is longer.

    Args:
      blocking_secs: b, seconds that a save blocks the training thread.
      mtbf_secs: M, mean time between failures of the whole run.
      durable_secs: P, seconds from the snapshot to the commit; None for a synchronous save, P = b.
      slowdown: s, the fraction by which steps take longer while a save is in flight.

    Raises:
      PlanError: a time is not a finite number or out of range, or saves take no time.
    """
    if durable_secs is None:
        durable_secs = blocking_secs
    cost_secs = save_cost_secs(
        blocking_secs=blocking_secs, durable_secs=durable_secs, slowdown=slowdown
    )
    wanted_secs = daly_training_secs(blocking_secs=cost_secs, mtbf_secs=mtbf_secs) + cost_secs
    if wanted_secs == 0:
        raise PlanError(
            "best_interval: blocking_secs and durable_secs: expected at least one time above 0, "
            "found 0 and 0; measure one save and give its times"
        )
    return BestInterval(
        interval_secs=max(durable_secs, wanted_secs),
        is_continuous=durable_secs >= wanted_secs,
    )


def expected_goodput(
    *,
    interval_secs: float,
    blocking_secs: float,
    durable_secs: float,
    mtbf_secs: float,
    restart_secs: float = 0.0,
    slowdown: float = 0.0,
) -> float:
    """Returns the goodput, a fraction of wall time, of a long run that saves periodically.

    The formula is (T - b) exp(-(P - b) / M) / ((M + R) (exp(T / M) - 1)): the k-th snapshot after a
    restart is durable k T + P - b seconds after it. So exp(-(k T + P - b) / M) is the probability
    that no failure undoes the T - b seconds of training before that snapshot, and the sum over all
    k is the training of one uptime that is kept on average. On average, an uptime begins M + R
    seconds after the previous one: failures during a restart do not count.

    Args:
      interval_secs: T, wall time from one snapshot to the next.
      blocking_secs, durable_secs, mtbf_secs, slowdown: as for ``best_interval``.
      restart_secs: R, seconds from a failure until training continues, with the restore.

    Raises:
      PlanError: a time is negative, P is less than b, or T is less than P.
    """
    cost_secs = save_cost_secs(
        blocking_secs=blocking_secs, durable_secs=durable_secs, slowdown=slowdown
    )
    arguments.positive("interval_secs", interval_secs, "give the seconds from snapshot to snapshot")
    arguments.at_least(
        "interval_secs", interval_secs, durable_secs, "a save begins when the last one is durable"
    )
    arguments.positive("mtbf_secs", mtbf_secs, _MTBF_HINT)
    arguments.at_least("restart_secs", restart_secs, 0, "give the seconds from failure to training")
    kept_secs_of_uptime = (
        (interval_secs - cost_secs)
        * math.exp(-(interval_secs + durable_secs - cost_secs) / mtbf_secs)
        / -math.expm1(-interval_secs / mtbf_secs)
    )
    return kept_secs_of_uptime / (mtbf_secs + restart_secs)
