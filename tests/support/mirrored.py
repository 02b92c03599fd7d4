"""Runs with a mirror, and what every kind of mirror promises."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from support.compare import assert_trees_identical
from support.steps import save
from support.training import adamw, mlp, train_step
from support.waiting import wait_until
from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.storage.directory.run_directory import RunDirectory


def opened(directory: Path, mirror: Any, **settings: Any) -> TorchaxCheckpointer:
    """A checkpointer that has attached, and so joined its mirror."""
    ckpt = TorchaxCheckpointer(directory, mirror=mirror, **settings)
    try:
        ckpt.attach(stateful={})
    except BaseException:
        ckpt.close()
        raise
    return ckpt


def trained(directory: Path, mirror: Any, *steps: int, **settings: Any) -> None:
    """Saves steps in one program; all are durable, and the last one is in the mirror."""
    with opened(directory, mirror, **settings) as ckpt:
        save(ckpt, *steps)


def wait_for(ckpt: TorchaxCheckpointer, step: int) -> None:
    """Waits until a step is in the mirror."""
    wait_until(lambda: ckpt.stats().mirrored_step == step)


def steps_of(place: Path) -> list[int]:
    return [s.step for s in RunDirectory(place, read_only=True).steps()]


def require_fetched_to_the_bit(directory: Path, mirror: Any) -> None:
    """Trains, removes the run's directory, and compares what the mirror gives back."""
    model = mlp()
    optimizer = adamw(model)
    with TorchaxCheckpointer(directory, mirror=mirror) as ckpt:
        assert ckpt.attach(model, optimizer) == 0
        for step in ckpt.steps(4):
            train_step(model, optimizer, step)
    shutil.rmtree(directory)
    with TorchaxCheckpointer(directory, mirror=mirror) as ckpt:
        fresh = mlp()
        assert ckpt.attach(fresh, adamw(fresh)) == 4
        assert_trees_identical(dict(fresh.state_dict()), dict(model.state_dict()))
        assert ckpt.verify(4) == 4
