"""Runs most of whose state does not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding

from support.compare import assert_trees_identical, training_state
from support.models import Tuned
from support.training import P, fsdp_mesh, fsdp_rule, place
from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies

REUSE = CheckpointOptions(reuse=True)
ALL = {"preservation_policy": policies.PreserveAll()}
ROWS = 1 << 15  # a leaf of 1 MiB


def committed(values: np.ndarray) -> jax.Array:
    return jax.device_put(values.astype(np.float32), jax.devices()[0])


def still_state(mesh: Mesh | None = None, **changing: float) -> dict[str, Any]:
    """Two leaves of 1 MiB that do not change, and small ones with the given values."""
    where = NamedSharding(mesh or fsdp_mesh(), P("fsdp"))
    base = {
        name: jax.device_put(np.random.default_rng(seed).random((ROWS, 8), np.float32), where)
        for seed, name in enumerate(("a", "b"))
    }
    return {"base": base, **{n: committed(np.full((4,), value)) for n, value in changing.items()}}


def save_all(directory: Path, states: list[Any], start: int = 1, **settings: Any) -> None:
    with TorchaxCheckpointer(directory, **{"options": REUSE, **settings}) as ckpt:
        for step, state in enumerate(states, start):
            ckpt.save(step, state=state, force=True)


def tuned(mesh: Mesh | None = None) -> Tuned:
    model = Tuned().to("jax")
    place(model, fsdp_rule(mesh or fsdp_mesh()))
    return model


def train(ckpt: TorchaxCheckpointer, model: Tuned, steps: range) -> None:
    """Changes the head and saves, step by step."""
    for step in steps:
        with torch.no_grad():
            model.head.weight.add_(step)
        ckpt.save(step, force=True)


def run(directory: Path, steps: range, mesh: Mesh | None = None, **settings: Any) -> list[Any]:
    """Resumes a run in a new model as a new program does, and trains; returns the state."""
    model = tuned(mesh)
    with TorchaxCheckpointer(directory, **{"options": REUSE, **settings}) as ckpt:
        start = ckpt.attach(model, shardings=fsdp_rule(mesh or fsdp_mesh()))
        assert start == steps.start - 1
        train(ckpt, model, steps)
        return training_state(model)


def assert_resumes(
    directory: Path, step: int, expected: list[Any], mesh: Mesh | None = None
) -> None:
    model = tuned(mesh)
    with TorchaxCheckpointer(directory, options=CheckpointOptions(read_only=True)) as ckpt:
        assert ckpt.attach(model, shardings=fsdp_rule(mesh or fsdp_mesh())) == step
    assert_trees_identical(training_state(model), expected)
