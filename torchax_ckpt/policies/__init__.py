"""Save decision and preservation policies: when a step is saved, and which steps are kept."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchax_ckpt.policies.preservation import BestN

if TYPE_CHECKING:
    from torchax_ckpt.policies.orbax_policies import (
        AnyPreservationPolicy,
        AnySavePolicy,
        CheckpointInfo,
        CustomSteps,
        DecisionContext,
        EveryNSeconds,
        EveryNSteps,
        FixedIntervalPolicy,
        InitialSavePolicy,
        LatestDuration,
        LatestN,
        PreemptionCheckpointingPolicy,
        PreservationContext,
        PreservationPolicy,
        PreserveAll,
        SaveDecisionPolicy,
        SpecificStepsPolicy,
    )
    from torchax_ckpt.policies.save_decision import (
        ContinuousCheckpointingPolicy,
        OptimalIntervalPolicy,
    )

__all__ = [
    "AnyPreservationPolicy",
    "AnySavePolicy",
    "BestN",
    "CheckpointInfo",
    "ContinuousCheckpointingPolicy",
    "CustomSteps",
    "DecisionContext",
    "EveryNSeconds",
    "EveryNSteps",
    "FixedIntervalPolicy",
    "InitialSavePolicy",
    "LatestDuration",
    "LatestN",
    "OptimalIntervalPolicy",
    "PreemptionCheckpointingPolicy",
    "PreservationContext",
    "PreservationPolicy",
    "PreserveAll",
    "SaveDecisionPolicy",
    "SpecificStepsPolicy",
]

_OWN = ("ContinuousCheckpointingPolicy", "OptimalIntervalPolicy")


def __getattr__(name: str) -> Any:  # at first use, because all but BestN import Orbax
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "save_decision" if name in _OWN else "orbax_policies"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
