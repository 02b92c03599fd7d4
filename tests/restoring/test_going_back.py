"""Going back: newer steps are abandoned, but not before a new one is durable."""

from __future__ import annotations

import logging
import shutil
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from support import PROGRAMS
from support.compare import assert_trees_identical, folders, training_state
from support.damage import flip_arrays, killed_before_setting_aside
from support.processes import run_python
from support.steps import save
from support.training import adamw, mlp, train_step

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.errors import StepError

KEEP_ALL = policies.PreserveAll()


def trained(directory: Path, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict]:
    """A run that saved every step; what each held."""
    model = mlp()
    optimizer = adamw(model)
    held = {}
    with TorchaxCheckpointer(directory, preservation_policy=KEEP_ALL) as ckpt:
        ckpt.attach(model, optimizer)
        for step in range(1, steps + 1):
            train_step(model, optimizer, step)
            ckpt.save(step, force=True)
            held[step] = training_state(model, optimizer)
    return model, optimizer, held


def test_newer_steps_stay_until_a_new_one_is_durable(directory: Path) -> None:
    model, optimizer, held = trained(directory, 6)
    with TorchaxCheckpointer(directory, preservation_policy=KEEP_ALL) as ckpt:
        ckpt.attach(model, optimizer)
        report = ckpt.restore(3)
        assert report.step == 3
        assert_trees_identical(training_state(model, optimizer), held[3])
        assert folders(directory) == {"1", "2", "3", "4", "5", "6"}
        train_step(model, optimizer, 100)
        save(ckpt, 4, of=None)
        assert ckpt.all_steps() == [1, 2, 3, 4]
        assert folders(directory) == {"1", "2", "3", "4"} | {f"abandoned-{s}" for s in (4, 5, 6)}
        new = training_state(model, optimizer)
        train_step(model, optimizer, 101)
        assert ckpt.save(5, force=True)
    fresh = mlp()
    fresh_optimizer = torch.optim.AdamW(fresh.parameters())
    with TorchaxCheckpointer(directory) as ckpt:
        assert ckpt.attach(fresh, fresh_optimizer) == 5
        ckpt.restore(4)
        assert_trees_identical(training_state(fresh, fresh_optimizer), new)


@pytest.mark.slow
def test_going_back_twice_keeps_every_abandoned_branch(directory: Path) -> None:
    model, optimizer, _ = trained(directory, 3)
    for _ in range(2):
        with TorchaxCheckpointer(directory, preservation_policy=KEEP_ALL) as ckpt:
            ckpt.attach(model, optimizer)
            ckpt.restore(2)
            ckpt.save(3, force=True)
    assert folders(directory) == {"1", "2", "3", "abandoned-3", "abandoned-3-2"}


def test_an_abandoned_step_does_not_take_the_name_of_one_that_counts(directory: Path) -> None:
    model, optimizer, _ = trained(directory, 3)
    for step in (3, 4):
        with TorchaxCheckpointer(directory, preservation_policy=KEEP_ALL) as ckpt:
            ckpt.attach(model, optimizer)
            ckpt.restore(step - 1)
            ckpt.save(step, force=True)
        if step == 3:  # it waited for its name when it was abandoned, and then came a kill
            (directory / "abandoned-3").rename(directory / "incoming-3")
    assert folders(directory) == {"1", "2", "3", "4", "abandoned-3"}


def test_starting_afresh_in_a_used_directory_abandons_what_is_there(directory: Path) -> None:
    trained(directory, 3)
    model = mlp()
    with TorchaxCheckpointer(directory, preservation_policy=KEEP_ALL) as ckpt:
        assert ckpt.attach(model, resume=False) == 0
        assert ckpt.all_steps() == [1, 2, 3]
        assert ckpt.save(1, force=True)
    assert folders(directory) == {"1", "abandoned-1", "abandoned-2", "abandoned-3"}


def test_an_unreadable_newest_step_is_skipped_and_then_abandoned(directory: Path) -> None:
    model, optimizer, held = trained(directory, 3)
    flip_arrays(directory / "3")
    with TorchaxCheckpointer(directory, preservation_policy=KEEP_ALL) as ckpt:
        with pytest.warns(UserWarning, match="skipping an unreadable checkpoint: step 3 in"):
            assert ckpt.attach(model, optimizer) == 2
        assert_trees_identical(training_state(model, optimizer), held[2])
        with pytest.warns(UserWarning, match="step 3"):
            assert ckpt.restore().skipped_steps == (3,)
        save(ckpt, 3, of=None)
        assert folders(directory) == {"1", "2", "3", "abandoned-3"}


def test_an_error_filter_for_warnings_does_not_keep_a_run_from_resuming(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, held = trained(directory, 3)
    (directory / "3" / "manifest" / "data.json").write_text("{")
    with TorchaxCheckpointer(directory) as ckpt, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ckpt.attach(model, optimizer) == 2
        assert ckpt.restore().skipped_steps == (3,)
    assert_trees_identical(training_state(model, optimizer), held[2])
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    skipped = [m for m in told if m.startswith("skipping an unreadable checkpoint: step 3 in")]
    assert len(skipped) == 2


def test_only_a_save_says_which_steps_will_be_set_aside(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = LocalTier(tmp_path / "ramdisk")
    model, optimizer, _ = trained(directory, 3)
    caplog.set_level(logging.INFO, "torchax_ckpt")

    def told() -> list[str]:
        return [r.getMessage() for r in caplog.records if "not on the branch" in r.getMessage()]

    with TorchaxCheckpointer(directory, options=CheckpointOptions(read_only=True)) as reader:
        reader.attach(model, optimizer)
        reader.restore(1)  # which changes nothing
    with TorchaxCheckpointer(directory, local=local) as ckpt:
        assert ckpt.attach(model, optimizer, resume=False) == 0
        ckpt.restore(3)  # what the error for a changed optimizer advises
        save(ckpt, 4, of=None)
        assert told() == []
        ckpt.restore(2)
        ckpt.restore(3)
        assert told() == []
        ckpt.save(4, force=True)
        expected = f"{directory}: steps [4] are not on the branch that this run continues; "
        ckpt.save(5, force=True)
        fate = f"stay on storage until `torchax-ckpt prune {directory} --abandoned --delete`"
        expected += f"they will be set aside once a new step is durable, and {fate} deletes them"
        assert told() == [expected]


def test_saving_below_the_restored_step_is_refused(directory: Path) -> None:
    model, optimizer, _ = trained(directory, 3)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model, optimizer)
        with pytest.raises(StepError, match="step 2 is below step 3"):
            ckpt.save(2, force=True)
        ckpt.restore(1)
        assert ckpt.save(2, force=True)


@pytest.mark.slow
def test_restoring_in_the_loop_goes_on_from_there(directory: Path) -> None:
    model, optimizer, held = trained(directory, 3)
    bodies = []
    with TorchaxCheckpointer(
        directory,
        save_decision_policy=policies.FixedIntervalPolicy(1),
        preservation_policy=KEEP_ALL,
    ) as ckpt:
        ckpt.attach(model, optimizer)
        for step in ckpt.steps(5):
            bodies.append(step)
            if bodies == [4]:
                ckpt.restore(2)  # the loss has spiked, say
                assert_trees_identical(training_state(model, optimizer), held[2])
                continue
            train_step(model, optimizer, step)
    assert bodies == [4, 3, 4, 5]
    assert ckpt.all_steps() == [1, 2, 3, 4, 5]


def test_a_step_removed_by_hand_does_not_stop_pruning(directory: Path) -> None:
    with TorchaxCheckpointer(directory, preservation_policy=policies.LatestN(2)) as ckpt:
        for step in range(1, 6):
            if step == 3:
                shutil.rmtree(directory / "1")
            save(ckpt, step, of={"w": np.zeros(2)})
    assert folders(directory) == {"4", "5"}


def test_deleting_the_newest_step_brings_no_abandoned_branch_back(directory: Path) -> None:
    killed_before_setting_aside(directory)
    with TorchaxCheckpointer(directory, preservation_policy=KEEP_ALL) as ckpt:
        assert ckpt.all_steps() == [10, 11]
        ckpt.delete(11)
        assert ckpt.all_steps() == [10]


def test_without_attach_what_is_newer_than_the_first_save_is_abandoned(directory: Path) -> None:
    trained(directory, 4)
    state = {"w": np.zeros(2)}
    with TorchaxCheckpointer(directory, preservation_policy=KEEP_ALL) as ckpt:
        assert not ckpt.save(4, state=state, force=True)  # it is there
        assert ckpt.save(3, state=state, force=True) is False
        ckpt.delete(3)
        assert ckpt.save(3, state=state, force=True)
    assert folders(directory) == {"1", "2", "3", "abandoned-4"}


@pytest.mark.parametrize(
    ("stage", "step"),
    [
        ("set steps aside", 3),
        pytest.param("set steps aside", 5, marks=pytest.mark.slow),
        pytest.param("settle a step", 3, marks=pytest.mark.slow),
    ],
)
def test_killed_before_the_old_branch_is_set_aside_it_still_does_not_come_back(
    stage: str, step: int, directory: Path
) -> None:
    arguments = "killed_going_back", str(directory), stage, str(step)
    result = run_python(PROGRAMS / "saves.py", *arguments, check=False)
    assert result.returncode == -signal.SIGKILL, result.stderr[-2000:]
    reader = TorchaxCheckpointer(directory)
    before = folders(directory)
    assert reader.all_steps() == [1, 2, step]  # a reader sees the new branch, and changes nothing
    np.testing.assert_array_equal(reader.load()["w"], np.full(3, 100))
    assert folders(directory) == before
    with TorchaxCheckpointer(directory, preservation_policy=KEEP_ALL) as ckpt:
        assert ckpt.attach(stateful={}) == step
        ckpt.save(step + 1, state={"w": np.zeros(3)}, force=True)
    assert ckpt.all_steps() == [1, 2, step, step + 1]
    assert folders(directory) == {"1", "2", str(step), str(step + 1), "abandoned-3", "abandoned-4"}
