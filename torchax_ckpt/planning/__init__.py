"""Planning: computes checkpoint sizes, the best save interval and the expected goodput.

All of this package except ``on_topology`` and ``step_on_topology`` only does arithmetic: it starts
no backend, reads no directory and imports neither torch, JAX nor Orbax.

- ``sizes``: bytes of a training state, and of the ramdisk that two-tier saving needs;
- ``intervals``: the intervals of Young and of Daly, and the goodput in closed form;
- ``runs``: the input of a simulation: the cluster, its storage tiers, the policies;
- ``schedule``: when snapshots begin and become durable between two failures;
- ``simulation``: draws or replays failures, and adds up how the run spent its time;
- ``topology_plan``: what saves need on a TPU topology, with the TPU's compiler and without TPUs;
- ``compiled_step``: what a training step and its saves need on a topology, in the same way;
- ``topology``, ``chips``: the devices of a topology, and published figures of their chips;
- ``arguments``: checks of the arguments of all these modules.

Terms: *goodput* is the fraction of wall time spent on training that no failure undoes. *MTBF* is
the mean time between failures. A save *blocks* the training thread at its start, and is *durable*
once it is committed. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from torchax_ckpt.planning.compiled_step import StepPlan, step_on_topology
    from torchax_ckpt.planning.topology_plan import TopologyPlan, on_topology

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
    "StepPlan",
    "Tier",
    "TopologyPlan",
    "TwoTier",
    "best_interval",
    "compare",
    "daly_training_secs",
    "draw_failures",
    "expected_goodput",
    "module_state_bytes",
    "on_topology",
    "ramdisk_bytes_per_host",
    "save_cost_secs",
    "simulate",
    "state_bytes",
    "step_on_topology",
    "young_interval_secs",
]

# Loaded at first use, because they import JAX.
_LAZY = {
    "StepPlan": "compiled_step",
    "TopologyPlan": "topology_plan",
    "on_topology": "topology_plan",
    "step_on_topology": "compiled_step",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"torchax_ckpt.planning.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
