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
from etils import epath
from support.compare import assert_trees_identical, entries, training_state
from support.damage import edit_json, flip_bit
from support.group import Group
from support.linked import assert_holds, data_file, databases, files
from support.models import Tuned

from torchax_ckpt import CheckpointOptions, Event, LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.processes.per_host import PerHostProcesses
from torchax_ckpt.saving.unchanged.reuse import Reuse
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory

REUSE = CheckpointOptions(reuse=True)


@pytest.fixture
def ramdisk(tmp_path: Path) -> Path:
    return tmp_path / "ramdisk"


def run(directory: Path, ramdisk: Path, last: int, keep: int = 8) -> list[object]:
    """Resumes in a new model, and saves each step locally and each second one durably, from 1."""
    model = Tuned().to("jax")
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


def assert_resumes(directory: Path, step: int, expected: list[object]) -> None:
    model = Tuned().to("jax")
    with TorchaxCheckpointer(directory, options=CheckpointOptions(read_only=True)) as ckpt:
        assert ckpt.attach(model) == step
    assert_trees_identical(training_state(model), expected)


def test_steps_link_within_their_tier_also_after_a_restart(directory: Path, ramdisk: Path) -> None:
    run(directory, ramdisk, 5)
    state = run(directory, ramdisk, 7)
    local = {step: files(ramdisk, step) for step in range(1, 8)}
    durable = {step: files(directory, step) for step in range(1, 8, 2)}
    for step in (3, 4, 5, 6, 7):
        assert databases(ramdisk, step) == ["ocdbt.process_unchanged0"]
        assert local[step] & local[step - 2]
        assert not local[step] & local[step - 1]
    for step in (5, 7):
        assert durable[step] & durable[step - 4]
        assert not durable[step] & durable[step - 2]
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
    model = Tuned().to("jax")
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


def test_what_was_read_on_other_hosts_is_not_taken_for_compared(tmp_path: Path) -> None:
    """A host may lack a local step that the run was restored from, or have a damaged one."""
    directory, hosts = (
        RunDirectory(tmp_path),
        PerHostProcesses(Processes("", 0, None, index=0, count=2)),
    )
    durable = Reuse(directory, True, True, list, lambda *_: None, lambda leaves: None)
    local = Reuse(directory, True, True, list, lambda *_: None, lambda leaves: None, hosts, durable)
    local.adopt(CommittedStep(1, epath.Path(tmp_path / "lacking"), 1), is_verified=True)
    assert local._continuation._verified is None
    alone = PerHostProcesses(Processes("", 0, None, index=0, count=1))
    local = Reuse(directory, True, True, list, lambda *_: None, lambda leaves: None, alone, durable)
    local.adopt(CommittedStep(1, epath.Path(tmp_path / "1"), 1), is_verified=True)
    assert local._continuation._verified == (1, 1)


def manifest_of(directory: Path, step: int) -> Path:
    return directory / str(step) / "manifest" / "data.json"


def learned(directory: Path, ramdisks: list[Path], searches: bool = True) -> list[Any]:
    """What processes with these local tiers know to be still once local step 4 is restored."""

    def act(member: Processes) -> tuple[bool, frozenset[str]]:
        arguments = True, searches, list, lambda *_: None, lambda leaves: None
        durable = Reuse(RunDirectory(directory), *arguments, member)
        place, hosts = ramdisks[member.index], PerHostProcesses(member)
        local = Reuse(RunDirectory(place), *arguments, hosts, leader=durable)
        local.adopt(CommittedStep(4, epath.Path(place / "4"), 4), is_verified=True)
        return durable._has_learned, durable._still

    return Group()(act)


def test_all_processes_learn_the_same_although_hosts_have_different_local_steps(
    directory: Path, ramdisk: Path, tmp_path: Path
) -> None:
    """They must have one storage plan. Process 0 may lack the local step, or have few databases."""
    run(directory, ramdisk, 4)
    lacking, few = tmp_path / "lacking", tmp_path / "few"
    shutil.copytree(ramdisk, few)
    edit_json(manifest_of(few, 4), lambda manifest: manifest["unchanged"].clear())
    base = (True, frozenset({"model/base.bias", "model/base.weight"}))
    nothing = (False, frozenset[str]())
    assert learned(directory, [lacking, ramdisk, few]) == [base] * 3
    assert learned(directory, [few, lacking, ramdisk]) == [base] * 3
    assert learned(directory, [ramdisk, few, few], searches=False) == [nothing] * 3
    manifest_of(directory, 3).write_text("{}")
    assert learned(directory, [few, few, few]) == [base] * 3, "from durable step 1"
    shutil.rmtree(directory / "3")
    manifest_of(directory, 1).write_text("{}")
    assert learned(directory, [lacking, ramdisk, few]) == [nothing] * 3
    assert learned(directory, [ramdisk, few, lacking]) == [base] * 3, "from the local step"
    shutil.rmtree(directory)
    assert learned(directory, [few, ramdisk, ramdisk]) == [nothing] * 3


@pytest.mark.slow
def test_a_damaged_local_copy_is_written_again_after_a_restart(
    directory: Path, ramdisk: Path
) -> None:
    run(directory, ramdisk, 4)
    flip_bit(path := data_file(ramdisk, 3), path.stat().st_size // 2)
    state = run(directory, ramdisk, 7)
    assert not files(ramdisk, 5) & files(ramdisk, 3)
    assert files(ramdisk, 6) & files(ramdisk, 4)
    assert files(ramdisk, 7) & files(ramdisk, 5)
    shutil.rmtree(directory / "7")
    shutil.copytree(ramdisk / "7", directory / "7")
    assert_resumes(directory, 7, state)


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
        for step in range(ckpt.attach() + 1, last + 1):
            assert ckpt.save(step, state=layers(step))
            ckpt.wait_until_finished()
    return {
        event.step: event.values["new_bytes"]
        for event in events
        if event.name == "durable" and event.step is not None
    }


def test_the_first_durable_save_after_a_restart_from_a_local_step_links(
    directory: Path, ramdisk: Path
) -> None:
    """Also if some layers of a stack change, which the plan of the first save must know."""
    saved(directory, ramdisk, 10)
    new = saved(directory, ramdisk, 15)
    assert new.keys() == {11, 13, 15}
    assert max(new.values()) < 1 << 20, new
    for step in (11, 15):
        assert files(directory, step) & files(directory, step - 4)
        assert not files(directory, step) & files(directory, step - 2)
        assert_holds(directory, step, layers(step))


def test_local_saves_after_a_restart_link_also_before_the_first_durable_save(
    directory: Path, ramdisk: Path
) -> None:
    """So does the first durable save after a second restart from a local step."""
    saved(directory, ramdisk, 10)
    assert saved(directory, ramdisk, 12, durable=()) == {}
    for step in (11, 12):
        assert files(ramdisk, step) & files(ramdisk, step - 2)
        assert not files(ramdisk, step) & files(ramdisk, step - 1)
        shutil.copytree(ramdisk / str(step), ramdisk.with_name("copy") / str(step))
        assert_holds(ramdisk.with_name("copy"), step, layers(step))
    new = saved(directory, ramdisk, 13)
    assert new.keys() == {13}
    assert new[13] < 1 << 20
    assert files(directory, 13) & files(directory, 7)
    assert_holds(directory, 13, layers(13))


def test_after_a_restart_from_a_local_step_a_damaged_durable_copy_is_written_again(
    directory: Path, ramdisk: Path
) -> None:
    """The local step says which leaves are still, but nothing about what durable steps hold."""
    saved(directory, ramdisk, 10)
    flip_bit(path := data_file(directory, 7), path.stat().st_size // 2)
    new = saved(directory, ramdisk, 13)
    assert new[11] > 1 << 20
    assert new[13] < 1 << 20
    assert_holds(directory, 11, layers(11))
    assert_holds(directory, 13, layers(13))
