"""Owns what is simulated: a cluster and how it fails, its storage tiers, and when it saves."""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

from torchax_ckpt.errors import PlanError
from torchax_ckpt.planning import arguments
from torchax_ckpt.planning.intervals import save_cost_secs, young_interval_secs

FailureKind = Literal["process", "slice", "cluster"]
"""What a failure takes: ``process`` programs only, ramdisks stay; ``slice`` hosts of one slice and
their ramdisks; ``cluster`` hosts of several slices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines of a run, and how they fail.

    Attributes:
      num_chips: in all slices together.
      host_mtbf_secs: mean time between failures that one host causes; that of the run is smaller
        by the number of hosts.
      chips_per_host: 4 on most TPUs.
      num_slices: each holds the whole state, if there are several.
      restart_secs: from a failure until the program runs again, without reading a checkpoint:
        noticing, scheduling, starting, compiling.
      process_fraction: share of the failures that are of kind ``process``.
      cluster_fraction: share of the failures that are of kind ``cluster``. The rest is ``slice``.
      restart_can_fail: failures during a restart begin it anew; otherwise they do not count.
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
        arguments.count("chips_per_host", self.chips_per_host, "4 on most TPUs")
        arguments.count("num_slices", self.num_slices, "a run without multislice has one")
        if self.num_chips % (self.chips_per_host * self.num_slices):
            raise PlanError(
                f"num_chips: expected a multiple of {self.num_slices} slices x "
                f"{self.chips_per_host} chips per host, found {self.num_chips}; slices are equal "
                "and hosts whole"
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
        """Hosts of all slices together."""
        return self.num_chips // self.chips_per_host

    @property
    def hosts_per_slice(self) -> int:
        """Hosts that share one copy of the state."""
        return self.num_hosts // self.num_slices

    @property
    def mtbf_secs(self) -> float:
        """Mean time between failures of the whole run, which any host's failure ends."""
        return self.host_mtbf_secs / self.num_hosts

    @property
    def local_loss_fraction(self) -> float:
        """Share of the failures after which no copy of the local tier is left."""
        return self.cluster_fraction if self.num_slices > 1 else 1 - self.process_fraction

    def local_survives(self, kind: FailureKind) -> bool:
        """Whether a copy of the local tier is left: ramdisks stayed, or another slice has one."""
        return kind == "process" or (kind == "slice" and self.num_slices > 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tier:
    """One place that checkpoints go to, and what that costs.

    Attributes:
      blocking_secs: b, seconds that a save blocks the training thread.
      durable_secs: P, seconds from the snapshot until the save is committed in this tier.
      restore_secs: seconds to read the newest checkpoint; a restart takes this and the cluster's
        ``restart_secs``.
      slowdown: the fraction by which steps take longer while a save is in flight and does not
        block. 0.05: 5 % longer.
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
        """Seconds of training that one save costs, by blocking it and by slowing it down."""
        return save_cost_secs(
            blocking_secs=self.blocking_secs,
            durable_secs=self.durable_secs,
            slowdown=self.slowdown,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A training run, without a decision on when it saves.

    Attributes:
      cluster: its machines.
      durable: storage that survives everything: a bucket.
      local: ramdisks of the hosts; used by ``TwoTier`` alone.
      step_secs: seconds of one step without saves; then saves begin between steps. None leaves
        time continuous.
    """

    cluster: Cluster
    durable: Tier
    local: Tier | None = None
    step_secs: float | None = None

    def __post_init__(self) -> None:
        if self.step_secs is not None:
            arguments.positive("step_secs", self.step_secs, "give the seconds of one step")


class Policy(Protocol):
    """How far apart saves to one tier are."""

    def interval_secs(self, tier: Tier, *, mtbf_secs: float, step_secs: float | None) -> float:
        """Wall time from one snapshot to the next; what is below P counts as P."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedInterval:
    """Saves every so many steps, or every so many seconds; exactly one of them is given.

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
                f"{self.num_steps!r} and secs={self.secs!r}; give one of them"
            )
        if self.num_steps is not None:
            arguments.count("num_steps", self.num_steps, "give the steps between two saves")
        else:
            arguments.positive("secs", self.secs or 0, "give the seconds between two saves")

    def interval_secs(self, tier: Tier, *, mtbf_secs: float, step_secs: float | None) -> float:
        """The steps and what a save costs, or the seconds."""
        if self.num_steps is None:
            assert self.secs is not None
            return self.secs
        if step_secs is None:
            raise PlanError(
                f"step_secs: expected the seconds of one step, found None, with "
                f"FixedInterval(num_steps={self.num_steps}); give Run(step_secs=...)"
            )
        return self.num_steps * step_secs + tier.cost_secs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continuous:
    """Saves whenever the last save is durable.

    Attributes:
      minimum_interval_secs: seconds from that commit to the next snapshot.
    """

    minimum_interval_secs: float = 0.0

    def __post_init__(self) -> None:
        arguments.at_least(
            "minimum_interval_secs", self.minimum_interval_secs, 0, "0 saves without a pause"
        )

    def interval_secs(self, tier: Tier, *, mtbf_secs: float, step_secs: float | None) -> float:
        """P, and the pause."""
        return tier.durable_secs + self.minimum_interval_secs


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimalInterval:
    """Saves every max(P, sqrt(2 b M)) seconds; M is that of the failures the tier is read after.

    Attributes:
      counts_slowdown: b is all that a save costs, as
        ``torchax_ckpt.policies.OptimalIntervalPolicy`` measures it; False leaves it at the blocking
        time.
    """

    counts_slowdown: bool = True

    def interval_secs(self, tier: Tier, *, mtbf_secs: float, step_secs: float | None) -> float:
        """max(P, sqrt(2 b M))."""
        return young_interval_secs(
            blocking_secs=tier.cost_secs if self.counts_slowdown else tier.blocking_secs,
            durable_secs=tier.durable_secs,
            mtbf_secs=mtbf_secs,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoTier:
    """Saves to the local tier often, and with every k-th of these saves to the durable one.

    k is the ratio of the two intervals, rounded, and such that saves of one tier do not overlap.

    Attributes:
      local: how often to the ramdisks.
      durable: how often to the bucket.
    """

    local: Policy
    durable: Policy
