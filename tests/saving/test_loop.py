"""The loop: ``steps`` and ``record``."""

from __future__ import annotations

import contextlib
import logging
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import assert_trees_identical, copied, training_state
from support.damage import set_commit_time
from support.training import mlp, train_step

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies, torchax_backend
from torchax_ckpt.errors import AttachError, CallError, MetricsError, StepTypeError
from torchax_ckpt.runtime import preemption

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


def test_an_exception_leaves_without_saving_the_unfinished_body(directory: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        TorchaxCheckpointer(directory, save_decision_policy=EVERY_STEP) as ckpt,
    ):
        ckpt.attach(mlp())
        for step in ckpt.steps(10):
            if step == 3:
                raise ZeroDivisionError
    assert ckpt.latest_step() == 2


def test_the_loop_saves_what_the_policy_says(directory: Path) -> None:
    policy = policies.AnySavePolicy(
        [policies.FixedIntervalPolicy(3), policies.SpecificStepsPolicy([4])]
    )
    with TorchaxCheckpointer(
        directory, save_decision_policy=policy, preservation_policy=KEEP_ALL
    ) as ckpt:
        ckpt.attach(mlp())
        list(ckpt.steps(8))
    assert ckpt.all_steps() == [3, 4, 6, 8]


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


def test_metrics_of_a_step_that_is_not_saved_are_dropped(directory: Path) -> None:
    with TorchaxCheckpointer(directory, save_decision_policy=NEVER) as ckpt:
        ckpt.attach(mlp())
        ckpt.record(val=1.0)
        assert not ckpt.save(1)
        assert ckpt.save(2, metrics={"loss": 2.0}, force=True)
    assert ckpt.metrics(2) == {"loss": 2.0}


def test_record_refuses_what_is_no_metric(directory: Path) -> None:
    with pytest.raises(MetricsError, match="'loss'"):
        TorchaxCheckpointer(directory).record(loss=object())


def test_a_preemption_saves_waits_and_ends_the_loop(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TorchaxCheckpointer(directory, save_decision_policy=NEVER) as ckpt:
        ckpt.attach(mlp())
        for step in ckpt.steps(10):
            if step == 3:
                monkeypatch.setattr(preemption._watch, "noticed_at", time.monotonic())
        assert step == 3
        assert ckpt.all_steps() == [3]
        assert ckpt.reached_preemption(3)
    assert ckpt.reached_preemption()


# --- on_exit="save" ----------------------------------------------------------------------------


class Position:
    """A stateful object that the body of a step changes first, as a loader is."""

    seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def leave(directory: Path, how: str, at: str) -> Any:
    """Trains two steps and leaves the third at this place of its body; returns step 2's state."""
    model, position = mlp(), Position()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    state: list[Any] = []
    ckpt = TorchaxCheckpointer(directory, save_decision_policy=NEVER)
    with contextlib.suppress(KeyboardInterrupt), ckpt:
        ckpt.attach(model, optimizer, lr_scheduler=schedule, stateful={"it": position})
        for step in ckpt.steps(10, on_exit="save"):
            position.seen += 1
            random.random()
            torch.randn(1, device="jax")
            if step == 3 and at == "before training":
                if how == "break":
                    break
                raise KeyboardInterrupt
            train_step(model, optimizer, step)
            schedule.step()
            ckpt.record(loss=step / 8)
            if step == 3:
                break
            if step == 2 and at == "before training":
                state = [training_state(model, optimizer), schedule.state_dict(), position.seen]
                state += [random.getstate(), copied(torchax_backend.prng_key())]
    return state


def test_a_loop_left_early_saves_its_first_step_also_with_reuse(directory: Path) -> None:
    """The first save of a run asks which parameters are frozen."""
    model = mlp()
    options = CheckpointOptions(reuse=True)
    with TorchaxCheckpointer(directory, save_decision_policy=NEVER, options=options) as ckpt:
        ckpt.attach(model)
        for step in ckpt.steps(10, on_exit="save"):
            if step == 2:
                break
    assert ckpt.all_steps() == [1]


@pytest.mark.parametrize("how", ["break", "interrupt"])
def test_a_loop_left_early_saves_the_last_completed_step_when_asked(
    directory: Path, how: str
) -> None:
    want = leave(directory, how, "before training")
    model, position = mlp(), Position()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    with TorchaxCheckpointer(directory) as ckpt:
        start = ckpt.attach(model, optimizer, lr_scheduler=schedule, stateful={"it": position})
        assert start == 2
        got = [training_state(model, optimizer), schedule.state_dict(), position.seen]
        got += [random.getstate(), copied(torchax_backend.prng_key())]
        assert_trees_identical(got, want)
        assert ckpt.metrics(2) == {"loss": 0.25}


def test_a_step_whose_arrays_the_next_body_replaced_is_not_saved(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave(directory, "break", "after training")
    assert TorchaxCheckpointer(directory).all_steps() == []
    (said,) = [r.getMessage() for r in caplog.records if "ended early" in r.message]
    assert "step 2 is not saved" in said
    assert "save(step, force=True) before break" in said


def test_a_step_that_was_saved_or_left_by_a_restore_is_not_saved_at_exit(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: Any = {"save_decision_policy": policies.SpecificStepsPolicy((1, 2))}
    with TorchaxCheckpointer(directory, preservation_policy=KEEP_ALL, **settings) as ckpt:
        ckpt.attach(mlp())
        for step in ckpt.steps(10, on_exit="save"):
            if step == 3:
                break
        for step in ckpt.steps(10, on_exit="save"):
            if step == 4:
                ckpt.restore(1)
                break
        ckpt.wait_until_finished()
        assert ckpt.all_steps() == [1, 2]
    assert ckpt.stats().num_saves == 2
    assert "ended early" not in caplog.text, "there was nothing to save"


def test_a_loop_that_outlives_its_checkpointer_saves_nothing(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with TorchaxCheckpointer(directory, save_decision_policy=NEVER) as ckpt:
        ckpt.attach(mlp())
        steps = ckpt.steps(10, on_exit="save")
        assert (next(steps), next(steps)) == (1, 2)
    del steps
    assert ckpt.all_steps() == []
    assert "step 1 could not be saved" in caplog.text


def test_on_exit_takes_only_what_it_knows(directory: Path) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(mlp())
        with pytest.raises(CallError, match='on_exit: expected "save" or None, found True'):
            ckpt.steps(3, on_exit=True)  # type: ignore[arg-type]


def test_steps_needs_attach_and_an_int(directory: Path) -> None:
    ckpt = TorchaxCheckpointer(directory)
    with pytest.raises(AttachError, match="steps was called before attach"):
        ckpt.steps(3)
    ckpt.attach(mlp())
    with pytest.raises(StepTypeError, match=r"expected an int, found 3\.0"):
        ckpt.steps(3.0)  # type: ignore[arg-type]
