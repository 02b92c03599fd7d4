"""Save decision and preservation policies: when a step is saved, and which steps are kept."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, TypeAlias

from torchax_ckpt.policies.preservation import BestN
from torchax_ckpt.runtime.lazily import orbax

if TYPE_CHECKING:
    from orbax.checkpoint import v1 as ocp

    from torchax_ckpt.policies.save_decision import (
        ContinuousCheckpointingPolicy,
        OptimalIntervalPolicy,
    )

    AnyPreservationPolicy = ocp.training.preservation_policies.AnyPreservationPolicy
    CustomSteps = ocp.training.preservation_policies.CustomSteps
    EveryNSeconds = ocp.training.preservation_policies.EveryNSeconds
    EveryNSteps = ocp.training.preservation_policies.EveryNSteps
    LatestDuration = ocp.training.preservation_policies.LatestDuration
    LatestN = ocp.training.preservation_policies.LatestN
    PreservationContext: TypeAlias = ocp.training.preservation_policies.PreservationContext
    PreservationPolicy: TypeAlias = ocp.training.preservation_policies.PreservationPolicy
    PreserveAll = ocp.training.preservation_policies.PreserveAll

    AnySavePolicy = ocp.training.save_decision_policies.AnySavePolicy
    DecisionContext: TypeAlias = ocp.training.save_decision_policies.DecisionContext
    FixedIntervalPolicy = ocp.training.save_decision_policies.FixedIntervalPolicy
    InitialSavePolicy = ocp.training.save_decision_policies.InitialSavePolicy
    PreemptionCheckpointingPolicy = (
        ocp.training.save_decision_policies.PreemptionCheckpointingPolicy
    )
    SaveDecisionPolicy: TypeAlias = ocp.training.save_decision_policies.SaveDecisionPolicy
    SpecificStepsPolicy = ocp.training.save_decision_policies.SpecificStepsPolicy

    CheckpointInfo: TypeAlias = ocp.training.CheckpointMetadata
    """A step as policies receive it: ``step``, ``time`` (aware datetime, UTC) and ``metrics``."""

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


def __getattr__(name: str) -> Any:  # at first use, because all but BestN import Orbax
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("ContinuousCheckpointingPolicy", "OptimalIntervalPolicy"):
        return getattr(importlib.import_module(f"{__name__}.save_decision"), name)
    training = orbax.v1.training
    if name == "CheckpointInfo":
        return training.CheckpointMetadata
    of_saves, of_steps = training.save_decision_policies, training.preservation_policies
    return getattr(of_saves if hasattr(of_saves, name) else of_steps, name)


def __dir__() -> list[str]:
    return sorted(__all__)
