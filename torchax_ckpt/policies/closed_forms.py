"""Closed forms: the best interval between saves and its goodput, and the bytes of a state.

T: wall time from one snapshot to the next. b: time that a save blocks training. P: time from the
snapshot to the commit. M: mean time between failures. R: time from a failure until training
continues. s: the fraction by which steps take longer while a save is in flight. Failures are a
Poisson process. A save costs b + (P - b) s / (1 + s) seconds of training (``save_cost_secs``),
which ``best_interval`` and ``expected_goodput`` put in place of every b.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from torchax_ckpt.errors import PlanError

if TYPE_CHECKING:
    import torch

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
    at_least("blocking_secs", blocking_secs, 0, hint)
    at_least(
        "durable_secs",
        durable_secs,
        blocking_secs,
        f"it lasts from the snapshot to the commit, so it includes the {blocking_secs:g} s of "
        "blocking_secs; both are equal if saves are synchronous",
    )
    at_least("slowdown", slowdown, 0, "0.05: steps take 5 % longer during a save")
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
    at_least("blocking_secs", blocking_secs, 0, "give the seconds that one save blocks")
    positive("mtbf_secs", mtbf_secs, _MTBF_HINT)
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
    positive("interval_secs", interval_secs, "give the seconds from snapshot to snapshot")
    at_least(
        "interval_secs", interval_secs, durable_secs, "a save begins when the last one is durable"
    )
    positive("mtbf_secs", mtbf_secs, _MTBF_HINT)
    at_least("restart_secs", restart_secs, 0, "give the seconds from failure to training")
    kept_secs_of_uptime = (
        (interval_secs - cost_secs)
        * math.exp(-(interval_secs + durable_secs - cost_secs) / mtbf_secs)
        / -math.expm1(-interval_secs / mtbf_secs)
    )
    return kept_secs_of_uptime / (mtbf_secs + restart_secs)


MOMENTS: dict[str, int] = {
    **dict.fromkeys(("none", "sgd"), 0),
    **dict.fromkeys(("adagrad", "asgd", "muon", "rmsprop", "sgd_momentum"), 1),
    **dict.fromkeys(("adadelta", "adam", "adamw", "nadam", "radam", "rprop"), 2),
}
"""Number of values that an optimizer keeps for each trained parameter.

The scalars that an optimizer keeps per tensor, a few bytes each, are not counted. ``rmsprop`` has
its default options: neither centered nor with momentum.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateBytes:
    """The sizes of a training state and its parts in bytes, without compression.

    Attributes:
      parameters_bytes: the weights; tied weights count once.
      optimizer_bytes: the optimizer's moments.
      buffers_bytes: the buffers that a module stores, for example running means.
    """

    parameters_bytes: int
    optimizer_bytes: int
    buffers_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole state, which is the size of one checkpoint."""
        return self.parameters_bytes + self.optimizer_bytes + self.buffers_bytes


def state_bytes(
    num_params: int,
    *,
    optimizer: str | float = "adamw",
    param_bytes: float = 4,
    moment_bytes: float | None = None,
) -> StateBytes:
    """Returns the size of the state of a model whose parameters are all trained.

    The default is 12 bytes per parameter: a float32 weight and AdamW's two float32 moments. For
    bfloat16 weights and float32 moments, use ``param_bytes=2, moment_bytes=4``; with float32 master
    weights besides, ``param_bytes=6, moment_bytes=4``.

    Args:
      num_params: the number of parameters.
      optimizer: its name in torch in lower case, or the number of values that the optimizer keeps
        per parameter (Adafactor's factored moments: about 0).
      param_bytes: bytes of one weight and its master copy, if there is one.
      moment_bytes: bytes of one value of the optimizer; None for ``param_bytes``, as in
        torch.optim.

    Raises:
      PlanError: a number is out of range, or the optimizer is unknown.
    """
    count("num_params", num_params, "give the number of parameters, for example 70_000_000_000")
    positive("param_bytes", param_bytes, "4 is float32, 2 is bfloat16")
    if moment_bytes is None:
        moment_bytes = param_bytes
    at_least("moment_bytes", moment_bytes, 0, "4 is float32, 2 is bfloat16")
    return StateBytes(
        parameters_bytes=math.ceil(num_params * param_bytes),
        optimizer_bytes=math.ceil(num_params * _num_moments(optimizer) * moment_bytes),
    )


def module_state_bytes(
    module: torch.nn.Module,
    *,
    optimizer: str | float = "adamw",
    moment_bytes: float | None = None,
) -> StateBytes:
    """Returns the size of a module's training state: parameters, moments and persistent buffers.

    Args:
      module: a module on any device, also on ``"meta"``. Frozen parameters have no moments.
      optimizer: as for ``state_bytes``.
      moment_bytes: bytes of one value of the optimizer; None for those of the parameter's dtype.

    Raises:
      PlanError: ``module`` is no module, or the optimizer is unknown.
    """
    if not callable(getattr(module, "state_dict", None)):
        raise PlanError(
            f"module: expected a torch.nn.Module, found {type(module).__name__}; "
            "if you only know the number of parameters, call state_bytes"
        )
    num_moments = _num_moments(optimizer)
    parameters = list(module.parameters())
    trained = [p for p in parameters if p.requires_grad]
    # keep_vars gives the module's own tensors, so tied ones are the same object. A state dict has
    # persistent buffers only, and extra state that need not be a tensor.
    values = module.state_dict(keep_vars=True).values()
    stored = {id(t): t for t in values if hasattr(t, "numel") and hasattr(t, "dtype")}
    for parameter in parameters:
        stored.pop(id(parameter), None)
    return StateBytes(
        parameters_bytes=sum(p.nbytes for p in parameters),
        optimizer_bytes=math.ceil(
            sum(p.numel() * num_moments * (moment_bytes or p.dtype.itemsize) for p in trained)
        ),
        buffers_bytes=sum(t.nbytes for t in stored.values()),
    )


def ramdisk_bytes_per_host(total_bytes: int, *, hosts_per_slice: int, num_copies: int = 2) -> int:
    """Returns the bytes that two-tier saving needs on the ramdisk of each host.

    Each slice holds the whole state, spread over its hosts. The result has 15 % on top, for
    metadata and for hosts that hold more than their share, as the makers of Orbax published.

    Args:
      total_bytes: bytes of one checkpoint.
      hosts_per_slice: number of hosts over which one checkpoint is spread.
      num_copies: number of checkpoints that exist at the same time, one of which is being written:
        3 with ``LocalTier(keep=2)``.

    Raises:
      PlanError: a number is out of range.
    """
    count("total_bytes", total_bytes, "give the bytes of one checkpoint, an int")
    count("hosts_per_slice", hosts_per_slice, "each slice has at least one host")
    count(
        "num_copies",
        num_copies,
        "the checkpoints that stay plus the one being written, by default 2",
    )
    return -(-total_bytes * num_copies * 115 // (100 * hosts_per_slice))


def _num_moments(optimizer: str | float) -> float:
    if isinstance(optimizer, str):
        if optimizer not in MOMENTS:
            raise PlanError(
                f"optimizer: expected one of {', '.join(sorted(MOMENTS))}, found {optimizer!r}; "
                "for any other optimizer give an int: how many values it keeps per parameter"
            )
        return MOMENTS[optimizer]
    at_least("optimizer", optimizer, 0, "give its name, or its number of values per parameter")
    return optimizer


def at_least(name: str, value: float, least: float, hint: str) -> None:
    """Raises PlanError unless ``value`` is a finite number of at least ``least``."""
    if not _is_number(value) or not least <= value < math.inf:
        raise PlanError(f"{name}: expected a number >= {least:g}, found {value!r}; {hint}")


def positive(name: str, value: float, hint: str) -> None:
    """Raises PlanError unless ``value`` is a finite number above zero."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise PlanError(f"{name}: expected a positive number, found {value!r}; {hint}")


def count(name: str, value: int, hint: str) -> None:
    """Raises PlanError unless ``value`` is an int above zero."""
    if not _is_number(value) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name}: expected a positive int, found {value!r}; {hint}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
