"""Save decisions: what policies are told, and what their answers decide."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.training import mlp

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.runtime import preemption

STATE = {"x": 1.5}


class Recording:
    """A policy that notes what it is told, and answers as another one."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.told: list[tuple[int, bool]] = []

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        self.told.append((step.step, context.reached_preemption))
        return self.policy.should_save(step, previous_steps, context=context)


@pytest.fixture
def end_the_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """As SIGTERM does."""
    return lambda: monkeypatch.setattr(preemption._watch, "noticed_at", time.monotonic())


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
    policy: Any, directory: Path, end_the_run: Callable[[], None]
) -> None:
    recording = Recording(policy)
    with TorchaxCheckpointer(directory, save_decision_policy=recording) as ckpt:
        for step in (1, 2):
            assert not ckpt.should_save(step)
            assert not ckpt.save(step, state=STATE)
        end_the_run()
        assert ckpt.should_save(3)
        assert ckpt.save(3, state=STATE)
        assert ckpt.all_steps() == [3]
        assert not ckpt.should_save(3)
        assert not ckpt.save(3, state=STATE)
    assert recording.told == [(1, False)] * 2 + [(2, False)] * 2 + [(3, True)] * 2


def test_a_policy_is_told_of_a_preemption_in_the_loop(
    directory: Path, end_the_run: Callable[[], None]
) -> None:
    recording = Recording(policies.SpecificStepsPolicy(()))
    with TorchaxCheckpointer(directory, save_decision_policy=recording) as ckpt:
        ckpt.attach(mlp())
        for step in ckpt.steps(10):
            if step == 3:
                end_the_run()
    assert recording.told == [(1, False), (2, False), (3, True)]
    assert ckpt.all_steps() == [3]  # whatever it answered


def test_a_policy_that_fails_at_a_preemption_does_not_keep_the_step_from_being_saved(
    directory: Path, end_the_run: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
            if context.reached_preemption:
                raise ZeroDivisionError
            return False

    with TorchaxCheckpointer(directory, save_decision_policy=Failing()) as ckpt:
        assert not ckpt.save(1, state=STATE)
        end_the_run()
        assert ckpt.save(2, state=STATE)
    assert ckpt.all_steps() == [2]
    assert "step 2: the save decision policy failed at a preemption" in caplog.text


def test_a_forced_save_asks_no_policy(directory: Path) -> None:
    recording = Recording(policies.SpecificStepsPolicy(()))
    with TorchaxCheckpointer(directory, save_decision_policy=recording) as ckpt:
        assert ckpt.save(1, state=STATE, force=True)
    assert recording.told == []
