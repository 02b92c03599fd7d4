"""Planning: computes checkpoint sizes, the best save interval and the expected goodput.

This package only does arithmetic: it starts no backend, reads no directory and imports neither
torch, JAX nor Orbax.

- ``sizes``: bytes of a training state, and of the ramdisk that two-tier saving needs;
- ``intervals``: the intervals of Young and of Daly, and the goodput in closed form;
- ``runs``: the input of a simulation: the cluster, its storage tiers, the policies;
- ``schedule``: when snapshots begin and become durable between two failures;
- ``simulation``: draws or replays failures, and adds up how the run spent its time;
- ``arguments``: checks of the arguments of all these modules.

Terms: *goodput* is the fraction of wall time spent on training that no failure undoes. *MTBF* is
the mean time between failures. A save *blocks* the training thread at its start, and is *durable*
once it is committed. Times are in seconds, sizes in bytes.
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
