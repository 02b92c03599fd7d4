"""A step is saved if a metric that a best-N rule ranks was recorded for it, not for the one before.

Metrics of a step that is not saved are kept for another save of this step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.stages import fail_at
from support.training import mlp

from torchax_ckpt import LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.policies import preservation
from torchax_ckpt.saving.saver import Saver

STATE = {"x": 1.5}
NEVER = policies.SpecificStepsPolicy(())
KEEP = policies.AnyPreservationPolicy(
    [policies.PreserveAll(), policies.BestN(metric="val"), policies.BestN(metric="f1", mode="max")]
)


def opened(directory: Path, save_policy: Any = NEVER, **more: Any) -> TorchaxCheckpointer:
    return TorchaxCheckpointer(
        directory, save_decision_policy=save_policy, preservation_policy=KEEP, **more
    )


def test_the_best_of_every_fifth_step_is_saved_and_kept(directory: Path) -> None:
    keep = policies.AnyPreservationPolicy([policies.LatestN(2), policies.BestN(metric="val")])
    with TorchaxCheckpointer(directory, preservation_policy=keep) as ckpt:
        ckpt.attach(mlp())
        for step in ckpt.steps(60):
            ckpt.record(loss=1.0)
            if step % 5 == 0:
                ckpt.record(val=abs(step - 20) / 10)
                assert ckpt.should_save(step)
    assert ckpt.best_step() == 20
    assert ckpt.all_steps()[0] == 20


def losses(step: int) -> dict[str, Any]:
    return {"val": float(step)}


@pytest.mark.parametrize(
    ("metrics", "saved"),
    [
        (losses, []),
        (lambda step: {"val": math.nan} if step % 3 else losses(step), []),
        (lambda step: losses(step) if step not in (4, 5) else {}, [6]),
        (lambda step: losses(step) if step > 1 else {}, [2]),
        (lambda step: {"f1": step} if step % 3 == 0 else {"loss": step}, [3, 6, 9]),
        (lambda step: {"f1": step} if step % 2 else losses(step), []),
        (lambda step: {"val": jnp.float32(step)} if step == 7 else {}, [7]),
        (lambda step: {"val": [math.nan, None, "low", True][step % 4]} if step % 2 else {}, []),
    ],
)
@pytest.mark.parametrize("records", [True, False])
def test_which_steps_are_due(
    metrics: Callable[[int], dict[str, Any]], saved: list[int], records: bool, directory: Path
) -> None:
    with opened(directory) as ckpt:
        for step in range(1, 11):
            if records:
                ckpt.record(**metrics(step))
                assert ckpt.should_save(step) is ckpt.should_save(step) is (step in saved)
            began = ckpt.save(step, state=STATE, metrics={} if records else metrics(step))
            assert began is (step in saved)
    assert ckpt.all_steps() == saved


def test_metrics_at_every_step_cost_no_further_save(directory: Path) -> None:
    for total in (48, 99):  # the second program resumes from step 48
        with opened(directory, policies.FixedIntervalPolicy(10)) as ckpt:
            ckpt.attach(mlp())
            for step in ckpt.steps(total):
                ckpt.record(val=1 / step)
                if step in (15, 66):
                    ckpt.save(step, force=True)
    assert ckpt.all_steps() == [10, 15, 20, 30, 40, 48, 50, 60, 66, 70, 80, 90, 99]


def test_the_first_step_of_a_program_is_not_due_the_second_is(directory: Path) -> None:
    with opened(directory) as ckpt:
        ckpt.attach(mlp())
        assert not ckpt.save(1, metrics={"val": 1})
        assert ckpt.save(3, metrics={"val": 1})
    with opened(directory) as ckpt:
        assert ckpt.attach(mlp()) == 3
        assert not ckpt.save(4, metrics={"val": 1})
        assert not ckpt.save(5, metrics={"val": 1})
        assert ckpt.save(7, metrics={"val": 1})
        ckpt.restore(3)
        assert not ckpt.save(4, metrics={"val": 1})
    with opened(directory / "no" / "step") as ckpt:
        ckpt.attach(mlp())
        assert ckpt.save(5, metrics={"val": 1})  # four steps passed without a call
    with opened(directory / "functional") as ckpt:
        assert not ckpt.save(105, state=STATE, metrics={"val": 1})
        assert ckpt.save(110, state=STATE, metrics={"val": 1})


def test_a_due_step_waits_for_the_save_in_flight_and_goes_to_the_durable_tier(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []
    wait = Saver.wait

    def noting(saver: Saver, *given: Any) -> None:
        if saver.is_saving:
            waited.append(saver.saving_step)
        wait(saver, *given)

    monkeypatch.setattr(Saver, "wait", noting)
    local = LocalTier(tmp_path / "local", save_decision_policy=NEVER)
    with opened(directory, policies.SpecificStepsPolicy([2]), local=local) as ckpt:
        ckpt.attach(mlp())
        assert [ckpt.save(2), ckpt.save(3, metrics={"f1": 1})] == [True, True]
        assert waited[0] == 2
    assert ckpt.all_steps("durable") == [2, 3]
    assert ckpt.all_steps("local") == []


def test_metrics_of_a_declined_save_are_stored_by_another_save_of_this_step(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with TorchaxCheckpointer(directory, save_decision_policy=NEVER) as ckpt:
        ckpt.record(a=1)
        assert not ckpt.save(7, state=STATE, metrics={"loss": 0.5, "b": 2})
        ckpt.record(b=3)
        assert not ckpt.save(7, state=STATE)
        assert ckpt.save(7, state=STATE, force=True, metrics={"c": 4})
        ckpt.record(f1=1)
        assert not ckpt.save(8, state=STATE, metrics={"loss": 0.25})
        assert not ckpt.save(9, state=STATE)
        assert ckpt.save(9, state=STATE, force=True)
        lost = jnp.ones(()) + 1
        assert not ckpt.save(10, state=STATE, metrics={"lost": lost, "kept": 1})
        jax.jit(lambda x: x + 1, donate_argnums=0)(lost)
        caplog.set_level(logging.WARNING)
        assert ckpt.save(10, state=STATE, force=True)
    assert ckpt.metrics(7) == {"a": 1, "loss": 0.5, "b": 3, "c": 4}
    assert ckpt.metrics(9) == {}
    assert ckpt.metrics(10) == {"kept": 1}
    assert "step 10 is saved without a metric: metric 'lost': its buffer was donated" in caplog.text


def test_metrics_of_a_save_that_failed_or_of_another_branch(directory: Path) -> None:
    with TorchaxCheckpointer(directory, save_decision_policy=NEVER) as ckpt:
        ckpt.attach(mlp())
        ckpt.save(1, force=True)
        ckpt.wait_until_finished()
        fail_at("write the arrays", OSError("failed"), number=1)
        ckpt.save(2, metrics={"loss": 2}, force=True)
        ckpt._saver.join()
        ckpt.save(2, force=True)
        assert not ckpt.save(3, metrics={"loss": 3})
        ckpt.restore(2)
        ckpt.save(3, force=True)
    assert ckpt.metrics(2) == {"loss": 2}
    assert ckpt.metrics(3) == {}


MISSPELLED = [("vall_loss", "val_loss"), ("val/los", "val_loss"), ("acc", "Acc"), ("vla", "val")]
OTHERS = [
    ("accuracy", "loss"),
    ("rmse", "mse"),
    ("loss_epoch", "loss_step"),
    ("mse", "mae"),
    ("loss2", "loss"),
]


def test_what_counts_as_misspelled() -> None:
    for ranked, recorded in (*MISSPELLED, *OTHERS):
        found = preservation.why_unranked([policies.BestN(metric=ranked)], [{recorded: 1}, {}])
        assert found[1] is ((ranked, recorded) in MISSPELLED), (ranked, recorded)


@pytest.mark.parametrize(("ranked", "recorded"), [("vall_loss", "val_loss"), ("accuracy", "loss")])
def test_a_ranked_metric_that_no_step_has_is_said_once(
    ranked: str, recorded: str, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = f"none of the 2 steps has the metric '{ranked}', by which they are ranked. They have "
    said += f"'{recorded}'"
    keep = policies.AnyPreservationPolicy([policies.LatestN(1), policies.BestN(metric=ranked)])
    with TorchaxCheckpointer(directory, preservation_policy=keep) as ckpt:
        for step in range(1, 5):
            ckpt.save(step, state=STATE, metrics={recorded: 1.0}, force=True)
            ckpt.wait_until_finished()
        # At once if it is misspelled. Otherwise an evaluation may still come, so at the end.
        assert (said in caplog.text) is (ranked == "vall_loss")
    assert caplog.text.count(said) == 1
    caplog.clear()
    with TorchaxCheckpointer(directory, preservation_policy=keep) as ckpt:
        ckpt.save(6, state=STATE, metrics={ranked: 1.0}, force=True)
        ckpt.save(7, state=STATE, metrics={recorded: 1.0}, force=True)
    assert "ranked" not in caplog.text


def test_a_run_that_is_evaluated_late_is_warned_neither_before_nor_after(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep = policies.AnyPreservationPolicy([policies.LatestN(2), policies.BestN(metric="val")])
    with TorchaxCheckpointer(directory, preservation_policy=keep) as ckpt:
        for step in range(1, 12):
            metrics = {"loss": 1.0, **({"val": 2.0} if step == 8 else {})}
            ckpt.save(step, state=STATE, metrics=metrics, force=True)
            ckpt.wait_until_finished()
    assert caplog.messages == []
    assert ckpt.all_steps() == [8, 10, 11]


def test_steps_that_follow_each_other_by_more_than_one_are_not_due(directory: Path) -> None:
    """As those of a training whose batches have several steps, which says so."""
    with opened(directory) as ckpt:
        for step in range(2, 20, 2):
            ckpt._loop.follows(step)
            assert not ckpt.save(step, state=STATE, metrics={"val": 1.0})
