"""Owns planning: what a run's checkpoints weigh, how often to save, what goodput to expect.

Arithmetic only: nothing here starts a backend, reads a directory or imports torch, JAX or Orbax.

- ``sizes``: bytes of a training state, and of the ramdisk that the two-tier mode needs;
- ``intervals``: Young's and Daly's intervals, and goodput in closed form;
- ``runs``: what is simulated: the cluster, its storage tiers, the policies;
- ``schedule``: when snapshots begin and become durable between two failures;
- ``simulation``: failures, drawn or replayed, and what is left of the time.

The words: *goodput* is the fraction of wall time that becomes training that is kept; *MTBF* the
mean time between failures; a save *blocks* the training thread first, and is *durable* once it is
committed. Times are in seconds, sizes in bytes.
"""

from torchax_ckpt.planning.intervals import (
    BestInterval,
    best_interval,
    daly_training_secs,
    expected_goodput,
    save_cost_secs,
    young_interval_secs,
)
from torchax_ckpt.planning.runs import (
    Cluster,
    Continuous,
    FailureKind,
    FixedInterval,
    OptimalInterval,
    Policy,
    Run,
    Tier,
    TwoTier,
)
from torchax_ckpt.planning.simulation import (
    Comparison,
    Failure,
    Outcome,
    compare,
    draw_failures,
    simulate,
)
from torchax_ckpt.planning.sizes import (
    StateBytes,
    module_state_bytes,
    ramdisk_bytes_per_host,
    state_bytes,
)

__all__ = [
    "BestInterval",
    "Cluster",
    "Comparison",
    "Continuous",
    "Failure",
    "FailureKind",
    "FixedInterval",
    "OptimalInterval",
    "Outcome",
    "Policy",
    "Run",
    "StateBytes",
    "Tier",
    "TwoTier",
    "best_interval",
    "compare",
    "daly_training_secs",
    "draw_failures",
    "expected_goodput",
    "module_state_bytes",
    "ramdisk_bytes_per_host",
    "save_cost_secs",
    "simulate",
    "state_bytes",
    "young_interval_secs",
]
