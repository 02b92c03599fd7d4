"""The loop: ``steps`` and ``record``."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.damage import set_commit_time
from support.stages import fail_at
from support.training import mlp, save_state, train_step

from torchax_ckpt import TorchaxCheckpointer, policies, torchax_backend
from torchax_ckpt.errors import ArgumentError, AttachError, ClosedError, SaveError

EVERY_STEP = policies.FixedIntervalPolicy(1)
NEVER = policies.SpecificStepsPolicy(())
KEEP_ALL = policies.PreserveAll()


def test_steps_go_from_the_restored_one_to_the_total(directory: Path) -> None:
    for total, expected in ((3, [1, 2, 3]), (5, [4, 5]), (5, []), (2, [])):
        with TorchaxCheckpointer(directory) as ckpt:
            ckpt.attach(mlp())
            assert list(ckpt.steps(total)) == expected


def test_a_start_says_in_a_line_where_it_resumes_and_whether_a_step_is_left(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torchax_ckpt")
    resumed = f"resumed from step 3 of {directory}, saved 3 min ago"
    replaced = f"{resumed}, in place of values that had been trained"
    for is_trained, line in ((False, ""), (False, resumed), (True, replaced)):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        for parameter in model.parameters() if is_trained or not line else ():
            optimizer.state[parameter]["momentum_buffer"] = parameter.detach()
        caplog.clear()
        with TorchaxCheckpointer(directory) as ckpt:
            ckpt.attach(model, optimizer)
            assert [m for m in caplog.messages if "resumed" in m] == [line] * bool(line)
            list(ckpt.steps(3))
        done = "steps(3) has nothing to do: step 3 is completed"
        assert (done in caplog.messages) is bool(line)
        set_commit_time(directory / "3", time.time_ns() - 180 * 10**9)


def test_the_last_step_is_saved_whatever_the_policy_says(directory: Path) -> None:
    with TorchaxCheckpointer(directory, save_decision_policy=NEVER) as ckpt:
        ckpt.attach(mlp())
        list(ckpt.steps(4))
        assert list(ckpt.steps(6)) == [5, 6]
    assert ckpt.all_steps() == [4, 6]


def test_break_leaves_without_saving_the_unfinished_body(directory: Path) -> None:
    with TorchaxCheckpointer(directory, save_decision_policy=EVERY_STEP) as ckpt:
        ckpt.attach(mlp())
        for step in ckpt.steps(10):
            if step == 3:
                break
        ckpt.wait_until_finished()
        assert ckpt.all_steps() == [1, 2]
        assert next(iter(ckpt.steps(10))) == 3


def test_recorded_metrics_belong_to_their_step(directory: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = {}
    with TorchaxCheckpointer(
        directory, save_decision_policy=EVERY_STEP, preservation_policy=KEEP_ALL
    ) as ckpt:
        ckpt.attach(model, optimizer)
        for step in ckpt.steps(3):
            losses[step] = train_step(model, optimizer, step)
            ckpt.record(loss=losses[step])
            if step == 2:
                ckpt.record(note="halfway", loss=0.5)
    assert ckpt.metrics(1) == {"loss": float(torchax_backend.buffer(losses[1]))}
    assert ckpt.metrics(2) == {"loss": 0.5, "note": "halfway"}
    assert ckpt.metrics(3) == {"loss": float(torchax_backend.buffer(losses[3]))}


# --- what policies are told, and what their answers decide ---

STATE = {"x": 1.5}


class Recording:
    """A policy that notes what it is told, and answers as another one."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.told: list[tuple[int, bool]] = []

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        self.told.append((step.step, context.reached_preemption))
        return self.policy.should_save(step, previous_steps, context=context)


@pytest.mark.parametrize(
    "policy",
    [
        policies.PreemptionCheckpointingPolicy(),
        policies.AnySavePolicy(
            [policies.FixedIntervalPolicy(1000), policies.PreemptionCheckpointingPolicy()]
        ),
    ],
    ids=["alone", "any"],
)
def test_the_preemption_policy_saves_at_a_preemption_and_never_otherwise(
    policy: Any, directory: Path, preempt: Callable[[], None]
) -> None:
    recording = Recording(policy)
    with TorchaxCheckpointer(directory, save_decision_policy=recording) as ckpt:
        for step in (1, 2):
            assert not ckpt.should_save(step)
            assert not ckpt.save(step, state=STATE)
        preempt()
        assert ckpt.should_save(3)
        assert ckpt.save(3, state=STATE)
        assert ckpt.all_steps() == [3]
        assert not ckpt.should_save(3)
        assert not ckpt.save(3, state=STATE)
        assert ckpt.save(4, state=STATE)  # the program goes on all the same
    assert recording.told == [(1, False)] * 2 + [(2, False)] * 2 + [(3, True)]


def test_a_notice_after_should_save_ends_the_program_at_a_later_step_which_is_saved(
    directory: Path, preempt: Callable[[], None]
) -> None:
    never = policies.SpecificStepsPolicy(())
    ckpt = TorchaxCheckpointer(directory, save_decision_policy=never)
    with pytest.raises(SystemExit), ckpt:
        for step in range(1, 9):
            must_save = ckpt.should_save(step)
            if step == 3:
                preempt()
            if must_save:
                ckpt.save(step, state=STATE)
            ckpt.exit_if_preempted(step)
    assert TorchaxCheckpointer(directory).all_steps() == [step] == [4]


def test_a_preemption_is_told_saves_and_ends_the_loop(
    directory: Path, preempt: Callable[[], None]
) -> None:
    recording = Recording(policies.SpecificStepsPolicy(()))
    with TorchaxCheckpointer(directory, save_decision_policy=recording) as ckpt:
        ckpt.attach(mlp())
        for step in ckpt.steps(10):
            if step == 3:
                preempt()
        assert step == 3
        assert ckpt.all_steps() == [3]  # whatever the policy answered
        assert ckpt.reached_preemption(3)
    assert ckpt.reached_preemption()
    assert recording.told == [(1, False), (2, False), (3, True)]


@pytest.mark.parametrize("where", ["after each save", "after the loop", "after with"])
def test_a_preempted_program_exits_with_an_error_code_once_its_step_is_durable(
    where: str, directory: Path, preempt: Callable[[], None]
) -> None:
    begun = []
    policy = policies.SpecificStepsPolicy(())
    with pytest.raises(SystemExit) as exited:
        with TorchaxCheckpointer(directory, save_decision_policy=policy) as ckpt:
            ckpt.attach(mlp())
            for step in [1, 2, 3, 4] if where == "after each save" else ckpt.steps(4):
                begun.append(step)
                if step == 2:
                    preempt()
                if where == "after each save":
                    ckpt.save(step)
                    ckpt.exit_if_preempted(step)
            if where == "after the loop":
                ckpt.exit_if_preempted()
        ckpt.exit_if_preempted()
    assert exited.value.code == 143
    assert begun == [1, 2]
    with pytest.raises(ClosedError):
        ckpt.save(3)
    assert TorchaxCheckpointer(directory).all_steps() == [2]


def test_only_a_preempted_program_exits_and_only_if_nothing_failed(
    directory: Path, preempt: Callable[[], None]
) -> None:
    ckpt = TorchaxCheckpointer(directory)
    ckpt.attach(mlp())
    assert ckpt.save(1)
    ckpt.exit_if_preempted(1)
    ckpt.exit_if_preempted()
    assert ckpt.save(2, force=True), "it is open"
    ckpt.wait_until_finished()
    fail_at("write the arrays", ZeroDivisionError())
    preempt()
    assert not ckpt.save(3)
    with pytest.raises(SaveError):  # not SystemExit, which promises that the step is durable
        ckpt.exit_if_preempted(3)


def test_a_policy_that_fails_at_a_preemption_does_not_keep_the_step_from_being_saved(
    directory: Path, preempt: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
            if context.reached_preemption:
                raise ZeroDivisionError
            return False

    with TorchaxCheckpointer(directory, save_decision_policy=Failing()) as ckpt:
        assert not ckpt.save(1, state=STATE)
        preempt()
        assert ckpt.save(2, state=STATE)
    assert ckpt.all_steps() == [2]
    assert "step 2: the save decision policy failed at a preemption" in caplog.text


def test_a_forced_save_asks_no_policy(directory: Path) -> None:
    recording = Recording(policies.SpecificStepsPolicy(()))
    save_state(directory, STATE, save_decision_policy=recording)
    assert recording.told == []


def test_functional_state_is_read_after_the_body_of_each_step_that_is_saved(
    directory: Path,
) -> None:
    asked: list[int] = []
    held: dict[str, int] = {}

    def current() -> dict[str, int]:
        asked.append(held["n"])
        return dict(held)

    for total, resumed in ((5, 0), (8, 5)):
        with TorchaxCheckpointer(directory, save_every=2, keep=9) as ckpt:
            assert ckpt.attach() == resumed
            assert not resumed or ckpt.load() == {"n": resumed}
            for held["n"] in ckpt.steps(total, state=current):
                ckpt.record(loss=1 / held["n"])
        assert ckpt.load(total) == {"n": total}
        assert ckpt.metrics(total) == {"loss": 1 / total}
    assert asked == [2, 4, 5, 6, 8]
    assert ckpt.all_steps() == [2, 4, 5, 6, 8]


def test_a_functional_state_that_nothing_has_loaded_is_warned_of_once(directory: Path) -> None:
    save_state(directory, {"n": 1})
    keep = policies.PreserveAll()

    def warnings_of(step: int, *, force: bool = True) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ckpt.save(step, state={"n": step}, force=force)
        assert all(warning.filename == __file__ for warning in caught)
        return [str(warning.message).partition(",")[0] for warning in caught]

    with TorchaxCheckpointer(
        directory, save_decision_policy=NEVER, preservation_policy=keep
    ) as ckpt:
        ckpt.attach()
        assert warnings_of(2, force=False) == []  # nothing is saved
        assert warnings_of(3) == ["step 1"]
        assert warnings_of(4) == []
        ckpt.load(1)
        ckpt.load(3)
        ckpt.restore(1)
        assert warnings_of(2) == []
        ckpt.restore(1)  # the state has gone on since it was loaded
        assert warnings_of(3) == ["step 1"]
        ckpt._loop.restored_from(1, is_functional=True)
        ckpt._loop.restored_from(2, is_functional=False)  # goes on from a step without such a state
        assert warnings_of(4) == []


def test_a_preempted_loop_over_functional_state_saves_its_step(
    directory: Path, preempt: Callable[[], None]
) -> None:
    with TorchaxCheckpointer(directory, save_decision_policy=NEVER) as ckpt:
        ckpt.attach()
        done: list[int] = []
        for step in ckpt.steps(9, state=lambda: {"n": done[-1]}):
            done.append(step)
            if step == 3:
                preempt()
        assert done == [1, 2, 3]
        assert ckpt.load() == {"n": 3}


def test_a_loop_refuses_state_that_is_no_function_or_gives_none(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach()
        with pytest.raises(ArgumentError, match="such as lambda: state, found a dict"):
            ckpt.steps(3, state={"n": 1})  # type: ignore[arg-type]
        with pytest.raises(AttachError, match="give the state"):
            list(ckpt.steps(3, state=lambda: None))
    assert ckpt.all_steps() == []
