"""Steps that are told apart by what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from torchax_ckpt import LocalTier, TorchaxCheckpointer, policies

ALWAYS = policies.FixedIntervalPolicy(1)


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(3, step), "device": jnp.full((4,), step)}


def save(ckpt: TorchaxCheckpointer, *steps: int, of: Any = state, force: bool = True) -> None:
    """Saves steps and waits for each.

    ``of``: the state of all, what makes that of a step, or None for the attached objects.
    """
    for step in steps:
        assert ckpt.save(step, state=of(step) if callable(of) else of, force=force)
        ckpt.wait_until_finished()


def save_states(
    directory: Path,
    states: Mapping[int, Any],
    metrics: Mapping[int, Any] = {},
    **settings: Any,
) -> Path:
    """Saves each state as a step, with its metrics, and keeps all; returns the directory."""
    keep = policies.PreserveAll()
    with TorchaxCheckpointer(directory, **{"preservation_policy": keep, **settings}) as ckpt:
        for step, of in states.items():
            assert ckpt.save(step, state=of, metrics=metrics.get(step), force=True)
            ckpt.wait_until_finished()
    return directory


def save_due(ckpt: TorchaxCheckpointer, *steps: int, of: Any = state) -> None:
    """Saves steps as the policy says, and waits for each."""
    save(ckpt, *steps, of=of, force=False)


def two_tiers(
    directory: Path | str,
    ramdisk: Path | str,
    *,
    durable: Any = (),
    local: Any = ALWAYS,
    keep: int = 9,
    **settings: Any,
) -> TorchaxCheckpointer:
    """Opens a run with a local tier; ``durable``: the policy, or the steps that are saved there."""
    if isinstance(durable, tuple):
        durable = policies.SpecificStepsPolicy(durable)
    return TorchaxCheckpointer(
        directory,
        save_decision_policy=durable,
        preservation_policy=policies.PreserveAll(),
        local=LocalTier(ramdisk, save_decision_policy=local, keep=keep),
        **settings,
    )
