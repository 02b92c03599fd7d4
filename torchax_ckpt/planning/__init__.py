"""Planning: computes checkpoint sizes, the best save interval and the expected goodput.

``on_topology`` and ``step_on_topology`` ask the TPU's compiler what fits a TPU topology. All other
functions only do arithmetic, and import neither torch, JAX nor Orbax. *Goodput* is the fraction of
wall time spent on training that no failure undoes; *MTBF* is the mean time between failures. A save
*blocks* the training thread at its start, and is *durable* once it is committed. Times are in
seconds, sizes in bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchax_ckpt.policies.closed_forms import (
    BestInterval,
    StateBytes,
    best_interval,
    daly_training_secs,
    expected_goodput,
    module_state_bytes,
    ramdisk_bytes_per_host,
    save_cost_secs,
    state_bytes,
    young_interval_secs,
)
from torchax_ckpt.runtime.lazily import attributes

if TYPE_CHECKING:
    from torchax_ckpt.planning.compiled_step import StepPlan, step_on_topology
    from torchax_ckpt.planning.topology_plan import TopologyPlan, on_topology

__all__ = [
    "BestInterval",
    "StateBytes",
    "StepPlan",
    "TopologyPlan",
    "best_interval",
    "daly_training_secs",
    "expected_goodput",
    "module_state_bytes",
    "on_topology",
    "ramdisk_bytes_per_host",
    "save_cost_secs",
    "state_bytes",
    "step_on_topology",
    "young_interval_secs",
]

# Loaded at first use, because they import JAX.
__getattr__ = attributes(
    __name__,
    {
        "StepPlan": "compiled_step",
        "TopologyPlan": "topology_plan",
        "on_topology": "topology_plan",
        "step_on_topology": "compiled_step",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
