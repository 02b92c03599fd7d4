"""Each of two tiers takes over what did not change, from its own steps."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from support.compare import entries, training_state
from support.linked import assert_holds, data_file, databases, files
from support.own_orbax import abstract
from support.still import REUSE, assert_resumes, tuned

from torchax_ckpt import Event, LocalTier, TorchaxCheckpointer, policies


@pytest.fixture
def ramdisk(tmp_path: Path) -> Path:
    return tmp_path / "ramdisk"


def run(directory: Path, ramdisk: Path, last: int, keep: int = 8) -> list[object]:
    """Resumes in a new model, and saves each step locally and each second one durably, from 1."""
    model = tuned()
    every = policies.FixedIntervalPolicy
    local = LocalTier(ramdisk, save_decision_policy=every(1), keep=keep)
    with TorchaxCheckpointer(
        directory,
        save_decision_policy=policies.SpecificStepsPolicy(tuple(range(1, 100, 2))),
        preservation_policy=policies.PreserveAll(),
        local=local,
        options=REUSE,
    ) as ckpt:
        for step in range(ckpt.attach(model) + 1, last + 1):
            with torch.no_grad():
                model.head.weight.add_(step)
            assert ckpt.save(step)
            ckpt.wait_until_finished()
    return training_state(model)


def test_steps_link_within_their_tier_also_after_a_restart(directory: Path, ramdisk: Path) -> None:
    run(directory, ramdisk, 5)
    state = run(directory, ramdisk, 7)
    local = {step: files(ramdisk, step) for step in range(1, 8)}
    durable = {step: files(directory, step) for step in range(1, 8, 2)}
    for step in (3, 4, 5, 6, 7):
        assert databases(ramdisk, step) == ["ocdbt.process_unchanged0"]
        assert bool(local[step] & local[step - 2]) == (step != 6)
        assert not local[step] & local[step - 1]
    assert durable[5] & durable[1]
    assert not durable[5] & durable[3]
    assert not durable[7] & durable[5]
    assert not set().union(*local.values()) & set().union(*durable.values())
    for step in (1, 2, 3, 4, 5, 6):
        shutil.rmtree(ramdisk / str(step))
    for step in (1, 3, 5):
        shutil.rmtree(directory / str(step))
    assert_resumes(directory, 7, state)
    shutil.rmtree(directory / "7")
    shutil.copytree(ramdisk / "7", directory / "7")
    assert_resumes(directory, 7, state)


@pytest.mark.usefixtures("identity_proves")
def test_neither_tier_looks_at_arrays_that_are_the_same_objects(
    directory: Path, ramdisk: Path, fetched: list[tuple[int, ...]]
) -> None:
    model = tuned()
    shape = tuple(model.base.weight.shape)
    local = LocalTier(ramdisk, save_decision_policy=policies.FixedIntervalPolicy(1), keep=2)
    durable = policies.SpecificStepsPolicy(tuple(range(1, 100, 2)))
    with TorchaxCheckpointer(
        directory, save_decision_policy=durable, local=local, options=REUSE
    ) as ckpt:
        ckpt.attach(model)
        for step in range(1, 19):
            with torch.no_grad():
                model.head.weight.add_(step)
                if step == 9:
                    model.base.weight.mul_(2)
            fetched.clear()
            assert ckpt.save(step)
            ckpt.wait_until_finished()
            if 5 <= step < 9 or step > 16:
                assert shape not in fetched, step
            assert step != 9 or shape in fetched
        state = training_state(model)
    assert_resumes(ramdisk, 18, state)
    assert_resumes(directory, 19, run(directory, ramdisk, 19))


def test_a_local_tier_of_one_step_has_one_copy(directory: Path, ramdisk: Path) -> None:
    """Two copies would take more space than steps that share nothing."""
    run(directory, ramdisk, 1, keep=1)
    before = data_file(ramdisk, 1).stat().st_ino
    run(directory, ramdisk, 4, keep=1)
    assert data_file(ramdisk, 4).stat().st_ino == before
    assert not {"unchanged", "1", "2", "3"} & entries(ramdisk)


def layers(step: int) -> dict[str, Any]:
    """Layers of 512 KiB in one stack; the first three do not change."""
    found = {
        str(i): np.random.default_rng(i).random((512, 256), np.float32) + (step if i > 2 else 0)
        for i in range(4)
    }
    device = jax.devices()[0]
    return {"h": {name: jax.device_put(host, device) for name, host in found.items()}}


def saved(
    directory: Path,
    ramdisk: Path,
    last: int,
    durable: Sequence[int] = range(1, 100, 2),
    **settings: Any,
) -> dict[int, int]:
    """Resumes, saves as ``run`` does, functional state; returns what durable saves wrote."""
    every = policies.FixedIntervalPolicy
    events: list[Event] = []
    with TorchaxCheckpointer(
        directory,
        save_decision_policy=policies.SpecificStepsPolicy(tuple(durable)),
        preservation_policy=policies.PreserveAll(),
        local=LocalTier(ramdisk, save_decision_policy=every(1), keep=8),
        options=dataclasses.replace(REUSE, **settings),
        on_event=events.append,
    ) as ckpt:
        if start := ckpt.attach():
            ckpt.load(start, abstract(layers(start)))
        for step in range(start + 1, last + 1):
            assert ckpt.save(step, state=layers(step))
            ckpt.wait_until_finished()
    return {
        event.step: event.values["new_bytes"]
        for event in events
        if event.name == "durable" and event.step is not None
    }


def test_a_restart_from_a_local_step_knows_what_is_still(directory: Path, ramdisk: Path) -> None:
    """Also if some layers of a stack change, which the plan of the first save must know.

    The local tier goes on from the step that it restored; of the durable tier, nothing was read.
    """
    saved(directory, ramdisk, 10)
    new = saved(directory, ramdisk, 17)
    assert {step: size < 1 << 20 for step, size in new.items()} == {
        11: False,
        13: False,
        15: True,
        17: True,
    }
    for step in (15, 17):
        assert files(directory, step) & files(directory, step - 4)
        assert not files(directory, step) & files(directory, step - 2)
    for step in (12, 13):
        assert files(ramdisk, step) & files(ramdisk, step - 2)
        assert not files(ramdisk, step) & files(ramdisk, step - 1)
    for step in (11, 17):
        assert_holds(directory, step, layers(step))
