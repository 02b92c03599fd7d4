"""Orbax's own policies, which this package offers under its name."""

from __future__ import annotations

from typing import TypeAlias

from orbax.checkpoint import v1 as ocp

PreservationPolicy: TypeAlias = ocp.training.preservation_policies.PreservationPolicy
PreservationContext: TypeAlias = ocp.training.preservation_policies.PreservationContext
PreserveAll = ocp.training.preservation_policies.PreserveAll
LatestN = ocp.training.preservation_policies.LatestN
EveryNSteps = ocp.training.preservation_policies.EveryNSteps
EveryNSeconds = ocp.training.preservation_policies.EveryNSeconds
LatestDuration = ocp.training.preservation_policies.LatestDuration
CustomSteps = ocp.training.preservation_policies.CustomSteps
AnyPreservationPolicy = ocp.training.preservation_policies.AnyPreservationPolicy

SaveDecisionPolicy: TypeAlias = ocp.training.save_decision_policies.SaveDecisionPolicy
DecisionContext: TypeAlias = ocp.training.save_decision_policies.DecisionContext
FixedIntervalPolicy = ocp.training.save_decision_policies.FixedIntervalPolicy
SpecificStepsPolicy = ocp.training.save_decision_policies.SpecificStepsPolicy
InitialSavePolicy = ocp.training.save_decision_policies.InitialSavePolicy
PreemptionCheckpointingPolicy = ocp.training.save_decision_policies.PreemptionCheckpointingPolicy
AnySavePolicy = ocp.training.save_decision_policies.AnySavePolicy

CheckpointInfo = ocp.training.CheckpointMetadata
"""A step as policies receive it: ``step``, ``time`` (aware datetime, UTC) and ``metrics``."""
