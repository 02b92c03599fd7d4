"""Classes that describe a simulated run: its cluster, failures, storage tiers and save policies."""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

from torchax_ckpt.errors import PlanError
from torchax_ckpt.planning import arguments
from torchax_ckpt.planning.intervals import save_cost_secs, young_interval_secs

FailureKind = Literal["process", "slice", "cluster"]
"""What a failure destroys.

``process``: programs only, so ramdisks survive. ``slice``: hosts of one slice, with their ramdisks.
``cluster``: hosts of several slices.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines of a run, and how often they fail.

    Attributes:
      num_chips: chips of all slices together.
      host_mtbf_secs: mean time between failures that one host causes. The mean time between
        failures of the run is this time divided by the number of hosts.
      chips_per_host: chips of one host; 4 on most TPUs.
      num_slices: number of slices. Each slice holds the whole state.
      restart_secs: seconds from a failure until the program runs again, without the time to read a
        checkpoint: for detecting the failure, scheduling, starting and compiling.
      process_fraction: share of the failures that are of kind ``process``.
      cluster_fraction: share of the failures that are of kind ``cluster``. All others are of kind
        ``slice``.
      restart_can_fail: if True, a failure during a restart starts the restart again; otherwise such
        failures do not count.
    """

    num_chips: int
    host_mtbf_secs: float
    chips_per_host: int = 4
    num_slices: int = 1
    restart_secs: float = 0.0
    process_fraction: float = 0.0
    cluster_fraction: float = 0.0
    restart_can_fail: bool = False

    def __post_init__(self) -> None:
        arguments.count("num_chips", self.num_chips, "give the chips of all slices together")
        arguments.count("chips_per_host", self.chips_per_host, "most TPUs have 4")
        arguments.count("num_slices", self.num_slices, "a run without multislice has one")
        if self.num_chips % (self.chips_per_host * self.num_slices):
            raise PlanError(
                f"num_chips: expected a multiple of {self.num_slices} slices x "
                f"{self.chips_per_host} chips per host, found {self.num_chips}; give each slice "
                "the same number of whole hosts"
            )
        arguments.positive("host_mtbf_secs", self.host_mtbf_secs, "a year is 31_536_000 s")
        arguments.at_least("restart_secs", self.restart_secs, 0, "give the seconds without reading")
        for name in ("process_fraction", "cluster_fraction"):
            arguments.fraction(name, getattr(self, name), "give its share of all failures")
        arguments.fraction(
            "process_fraction + cluster_fraction",
            self.process_fraction + self.cluster_fraction,
            "they are shares of the same failures",
        )

    @property
    def num_hosts(self) -> int:
        """Number of hosts of all slices together."""
        return self.num_chips // self.chips_per_host

    @property
    def hosts_per_slice(self) -> int:
        """Number of hosts in one slice; together these hosts hold one copy of the state."""
        return self.num_hosts // self.num_slices

    @property
    def mtbf_secs(self) -> float:
        """Mean time between failures of the whole run; the failure of any host ends the run."""
        return self.host_mtbf_secs / self.num_hosts

    @property
    def local_loss_fraction(self) -> float:
        """Share of the failures after which no copy in the local tier survives."""
        return self.cluster_fraction if self.num_slices > 1 else 1 - self.process_fraction

    def local_survives(self, kind: FailureKind) -> bool:
        """Returns whether the local tier still has the state after a failure of this kind."""
        return kind == "process" or (kind == "slice" and self.num_slices > 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tier:
    """One storage tier, and what saves and restores cost there.

    Attributes:
      blocking_secs: b, seconds that a save blocks the training thread.
      durable_secs: P, seconds from the snapshot to the commit in this tier.
      restore_secs: seconds to read the newest checkpoint. A restart takes the sum of this time and
        the cluster's ``restart_secs``.
      slowdown: the fraction by which steps take longer while a save is in flight but does not
        block. 0.05 means 5 % longer.
    """

    blocking_secs: float
    durable_secs: float
    restore_secs: float = 0.0
    slowdown: float = 0.0

    def __post_init__(self) -> None:
        arguments.save_times(self.blocking_secs, self.durable_secs, self.slowdown)
        arguments.at_least("restore_secs", self.restore_secs, 0, "give the seconds a restore takes")

    @property
    def cost_secs(self) -> float:
        """Seconds of training that one save costs by blocking and slowing the training."""
        return save_cost_secs(
            blocking_secs=self.blocking_secs,
            durable_secs=self.durable_secs,
            slowdown=self.slowdown,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The cluster, storage tiers and step time of a training run; a ``Policy`` says when to save.

    Attributes:
      cluster: the machines of the run, and how they fail.
      durable: the tier that survives all failures: a bucket.
      local: the tier on the hosts' ramdisks; only ``TwoTier`` uses it.
      step_secs: seconds of one step without saves. If given, saves begin only between steps; if
        None, saves can begin at any time.
    """

    cluster: Cluster
    durable: Tier
    local: Tier | None = None
    step_secs: float | None = None

    def __post_init__(self) -> None:
        if self.step_secs is not None:
            arguments.positive("step_secs", self.step_secs, "give the seconds of one step")


class Policy(Protocol):
    """Decides the time between saves to one tier."""

    def interval_secs(self, tier: Tier, *, mtbf_secs: float, step_secs: float | None) -> float:
        """Returns the seconds from one snapshot to the next that the policy aims at.

        The run takes ``tier.durable_secs`` instead if that is longer.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedInterval:
    """Saves at a fixed interval, given either in steps or in seconds.

    Attributes:
      num_steps: steps from one snapshot to the next.
      secs: wall time from one snapshot to the next.
    """

    num_steps: int | None = None
    secs: float | None = None

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.secs is None):
            raise PlanError(
                f"FixedInterval: expected either num_steps or secs, found num_steps="
                f"{self.num_steps!r} and secs={self.secs!r}; give exactly one of the two"
            )
        if self.num_steps is not None:
            arguments.count("num_steps", self.num_steps, "give the steps between two saves")
        else:
            arguments.positive("secs", self.secs or 0, "give the seconds between two saves")

    def interval_secs(self, tier: Tier, *, mtbf_secs: float, step_secs: float | None) -> float:
        """Returns ``secs``; if it is None, the time of ``num_steps`` steps plus one save's cost."""
        if self.num_steps is None:
            assert self.secs is not None
            return self.secs
        if step_secs is None:
            raise PlanError(
                f"FixedInterval(num_steps={self.num_steps}): expected the seconds of one step, "
                "found Run(step_secs=None); give Run(step_secs=...), or FixedInterval(secs=...)"
            )
        return self.num_steps * step_secs + tier.cost_secs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continuous:
    """Begins each save ``minimum_interval_secs`` after the previous save became durable.

    Attributes:
      minimum_interval_secs: seconds from the commit of a save to the next snapshot.
    """

    minimum_interval_secs: float = 0.0

    def __post_init__(self) -> None:
        arguments.at_least(
            "minimum_interval_secs", self.minimum_interval_secs, 0, "0 saves without a pause"
        )

    def interval_secs(self, tier: Tier, *, mtbf_secs: float, step_secs: float | None) -> float:
        """Returns ``tier.durable_secs`` plus ``minimum_interval_secs``."""
        return tier.durable_secs + self.minimum_interval_secs


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimalInterval:
    """Saves at Young's interval, every max(P, sqrt(2 b M)) seconds.

    P is the tier's ``durable_secs``. M is the mean time between those failures after which a
    restart reads the tier.

    Attributes:
      counts_slowdown: if True, b is the whole cost of a save, as
        ``torchax_ckpt.policies.OptimalIntervalPolicy`` measures it; if False, b is the blocking
        time alone.
    """

    counts_slowdown: bool = True

    def interval_secs(self, tier: Tier, *, mtbf_secs: float, step_secs: float | None) -> float:
        """Returns Young's interval for saves to ``tier``; see ``young_interval_secs``."""
        return young_interval_secs(
            blocking_secs=tier.cost_secs if self.counts_slowdown else tier.blocking_secs,
            durable_secs=tier.durable_secs,
            mtbf_secs=mtbf_secs,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoTier:
    """Saves every snapshot to the local tier, and every k-th snapshot also to the durable tier.

    k is the interval of the durable tier divided by the interval of the local tier, rounded, but at
    least so large that a save to the durable tier ends before the next save to that tier begins.

    Attributes:
      local: how often to save to the ramdisks.
      durable: how often to save to the bucket.
    """

    local: Policy
    durable: Policy
