"""Policies: when a step is saved, which steps are kept, which is best."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.errors import MetricsError, PolicyError, SaveError
from torchax_ckpt.policies import preservation_rules
from torchax_ckpt.policies.save_decision import StepTimes

STATE = {"w": np.zeros(1)}
BEST = policies.BestN(metric="loss")


def saved(
    directory: Path, preservation_policy: Any, losses: Sequence[float | None]
) -> TorchaxCheckpointer:
    """A run that saved steps 1, 2, ... with these losses."""
    with TorchaxCheckpointer(directory, preservation_policy=preservation_policy) as ckpt:
        for step, loss in enumerate(losses, 1):
            metrics = {} if loss is None else {"loss": loss}
            ckpt.save(step, state=STATE, metrics=metrics, force=True)
    return ckpt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (None, [5, 6, 7]),
        (policies.PreserveAll(), [1, 2, 3, 4, 5, 6, 7]),
        (policies.EveryNSteps(3), [3, 6, 7]),
        (policies.EveryNSeconds(3600), [1, 7]),
        (policies.CustomSteps([2, 5]), [2, 5, 7]),
        (policies.LatestDuration(datetime.timedelta(0)), [7]),
        (policies.BestN(metric="loss", mode="max", n=2), [1, 2, 7]),
        (policies.AnyPreservationPolicy([policies.LatestN(2), BEST]), [4, 6, 7]),
    ],
)
def test_what_is_kept(policy: Any, kept: list[int], directory: Path) -> None:
    ckpt = saved(directory, policy, [9.0, 8.0, 3.0, 1.0, 4.0, 2.0, 5.0])
    assert ckpt.all_steps() == kept


def test_best_step_is_the_best_of_those_there(directory: Path) -> None:
    policy = policies.AnyPreservationPolicy(
        [policies.LatestN(1), policies.BestN(metric="loss", mode="max", n=2)]
    )
    ckpt = saved(directory, policy, [3.0, 9.0, None, 9.0, 1.0])
    assert ckpt.all_steps() == [2, 4, 5]
    assert ckpt.best_step() == 4  # of equals the newest


def test_best_step_without_a_rule_or_without_metrics(directory: Path) -> None:
    ckpt = saved(directory, policies.LatestN(3), [1.0])
    with pytest.raises(PolicyError, match=r"policies\.BestN"):
        ckpt.best_step()
    reader = TorchaxCheckpointer(directory, preservation_policy=policies.BestN(metric="accuracy"))
    assert reader.best_step() is None


def test_nan_cannot_be_ranked(directory: Path) -> None:
    with TorchaxCheckpointer(directory, preservation_policy=policies.BestN(metric="loss")) as ckpt:
        with pytest.raises(MetricsError, match="'loss' at step 1 is nan"):
            ckpt.save(1, state=STATE, metrics={"loss": float("nan")})
        assert ckpt.save(1, state=STATE, metrics={"other": float("nan")})


AN_HOUR_AGO = int(time.time()) - 3600.5  # its sums with ints are exact


# As a rule is written -> the policy.
RULES: dict[str, Any] = {
    "PreserveAll": policies.PreserveAll(),
    "LatestN": policies.LatestN(),
    **{f"LatestN({n})": policies.LatestN(n) for n in (1, 3)},
    **{f"EveryNSteps({n})": policies.EveryNSteps(n) for n in (1, 5)},
    "EveryNSteps(4, False)": policies.EveryNSteps(4, False),
    "EveryNSteps(2, 2)": policies.EveryNSteps(2, True, 2),
    "EveryNSteps(2, 0)": policies.EveryNSteps(2, True, 0),
    **{f"EveryNSeconds({n})": policies.EveryNSeconds(n) for n in (0, 7)},
    **{
        f"LatestDuration({n}.0)": policies.LatestDuration(datetime.timedelta(seconds=n))
        for n in (0, 3590, 4000)
    },
    "CustomSteps(3, 7, 8)": policies.CustomSteps([3, 7, 8]),
    "BestN(loss, min, 2)": policies.BestN(metric="loss", n=2),
    "BestN(loss, max, 1)": policies.BestN(metric="loss", mode="max"),
}


@pytest.mark.parametrize("words", RULES)
@hypothesis.settings(max_examples=25)
@hypothesis.given(
    found=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 20), st.none() | st.integers(0, 3)),
        max_size=8,
        unique_by=lambda each: each[0],
    ).map(sorted)
)
def test_a_rule_in_json_keeps_what_orbaxs_policy_of_this_name_keeps(
    words: str, found: list[tuple[int, int, int | None]]
) -> None:
    steps, infos = [], []
    for step, secs, loss in found:
        metrics = {} if loss is None else {"loss": loss}
        at = AN_HOUR_AGO + secs
        steps.append(preservation_rules.StepInfo(step, at, metrics))
        infos.append(info(step, at, metrics))
    (rule,) = json.loads(json.dumps(preservation_rules.rules_of(RULES[words])))
    kept = preservation_rules.kept_by(rule, steps, [False] * len(steps))
    assert kept is not None
    context = policies.PreservationContext()
    assert kept == list(RULES[words].should_preserve(infos, context=context))
    assert preservation_rules.rule_text(rule) == words


@dataclasses.dataclass
class EvenSteps:
    """A user's own policies need no base class."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return step.step % 2 == 0

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        return [c.step % 4 == 0 for c in checkpoints]


def test_a_users_own_policies_work(directory: Path) -> None:
    own = EvenSteps()
    assert isinstance(own, policies.SaveDecisionPolicy)
    with TorchaxCheckpointer(directory, save_decision_policy=own, preservation_policy=own) as ckpt:
        began = [ckpt.save(step, state=STATE) for step in range(1, 11)]
    assert began == [False, True] * 5
    assert ckpt.all_steps() == [4, 8, 10]


def test_a_policy_that_answers_nonsense_deletes_nothing(directory: Path) -> None:
    class Short:
        def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
            return [False]

    with TorchaxCheckpointer(directory, preservation_policy=Short()) as ckpt:
        ckpt.save(1, state=STATE, force=True)
        ckpt.wait_until_finished()
        ckpt.save(2, state=STATE, force=True)
        with pytest.raises(SaveError, match=r"step 2 is durable .* returned 1 value for 2"):
            ckpt.wait_until_finished()
        assert ckpt.all_steps() == [1, 2]


def test_what_is_no_policy_is_refused(directory: Path) -> None:
    with pytest.raises(PolicyError, match="should_save"):
        TorchaxCheckpointer(directory, save_decision_policy=policies.LatestN(3))
    with pytest.raises(PolicyError, match="should_preserve"):
        TorchaxCheckpointer(directory, preservation_policy=3)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: policies.FixedIntervalPolicy(0), "interval: expected an int of at least 1"),
        (lambda: policies.FixedIntervalPolicy(2.5), "found 2.5"),
        (lambda: policies.FixedIntervalPolicy("10"), "found '10'"),
        (lambda: policies.SpecificStepsPolicy(["1"]), "SpecificStepsPolicy: steps: expected"),
        (lambda: policies.SpecificStepsPolicy("1,2"), "a list, set or range of ints"),
        (lambda: policies.SpecificStepsPolicy(iter([1, 2])), "found <list_iterator"),
        (lambda: policies.LatestN("3"), "n: expected an int or None, found '3'"),
        (lambda: policies.LatestN(-1), "found -1"),
        (lambda: policies.EveryNSteps(0), "EveryNSteps: interval_steps: expected an int"),
        (lambda: policies.CustomSteps({"1"}), "CustomSteps: steps: expected"),
    ],
)
def test_values_with_which_a_policy_fails_or_always_says_no_are_refused(
    build: Any, said: str, directory: Path
) -> None:
    policy: Any = build()
    argument, join = "preservation_policy", policies.AnyPreservationPolicy
    if hasattr(policy, "should_save"):
        argument, join = "save_decision_policy", policies.AnySavePolicy
    for given in (policy, join([policy])):
        with pytest.raises(PolicyError, match=f"^{argument}: .*{re.escape(said)}"):
            TorchaxCheckpointer(directory, **{argument: given})
    assert not directory.exists()


def test_values_that_work_are_accepted(directory: Path) -> None:
    class Odd:
        def __contains__(self, step: object) -> bool:
            return step in (1, 3)

    steps: Any
    for steps in ([1, 3.0], {1, 3}, range(1, 4, 2), np.array([1, 3]), Odd(), {1: "a", 3: "b"}):
        save: Any = policies.AnySavePolicy([policies.SpecificStepsPolicy(steps)])
        keep: Any = policies.AnyPreservationPolicy([policies.LatestN(None)])
        path = directory / str(type(steps).__name__)
        with TorchaxCheckpointer(path, save_decision_policy=save, preservation_policy=keep) as ckpt:
            for step in range(1, 5):
                ckpt.save(step, state=STATE)
                ckpt.wait_until_finished()
            assert ckpt.all_steps() == [1, 3]
    own: Any = policies.FixedIntervalPolicy(2.0)
    TorchaxCheckpointer(
        directory, save_decision_policy=own, preservation_policy=policies.LatestN(0)
    )


def test_the_error_of_a_policy_is_told_with_its_name(directory: Path) -> None:
    keep = policies.AnyPreservationPolicy([])
    with TorchaxCheckpointer(directory, preservation_policy=keep) as ckpt:
        ckpt.save(1, state=STATE, force=True)
        with pytest.raises(SaveError, match=r"AnyPreservationPolicy.should_preserve failed with T"):
            ckpt.wait_until_finished()
        assert ckpt.all_steps() == [1]


def info(step: int, at: float, metrics: Any = None) -> Any:
    return policies.CheckpointInfo(
        step, Path(), metadata=None, commit_timestamp_nsecs=int(at * 1e9), metrics=metrics
    )


def decide(policy: Any, seconds: float, saved_at: Sequence[float], **context: Any) -> bool:
    saved_steps = [info(i, at) for i, at in enumerate(saved_at)]
    return policy.should_save(info(9, seconds), saved_steps, context=ocp_context(**context))


def ocp_context(is_saving_in_progress: bool = False, reached_preemption: bool = False) -> Any:
    return policies.DecisionContext(
        is_saving_in_progress=is_saving_in_progress,
        reached_preemption=reached_preemption,
        multiprocessing_options=ocp.options.MultiprocessingOptions(),
    )


def test_continuous_initial_and_preemption_policies() -> None:
    always = policies.ContinuousCheckpointingPolicy()
    assert decide(always, 100, [])
    assert decide(always, 100, [99.999])
    assert not decide(always, 100, [], is_saving_in_progress=True)
    spaced = policies.ContinuousCheckpointingPolicy(minimum_interval_secs=30)
    assert decide(spaced, 100, [])
    assert decide(spaced, 100, [10, 70])
    assert not decide(spaced, 100, [10, 70.5])
    assert not decide(spaced, 100, [10], is_saving_in_progress=True)
    initial = policies.InitialSavePolicy()
    assert decide(initial, 1, [])
    assert not decide(initial, 1, [0.5])
    preemption = policies.PreemptionCheckpointingPolicy()
    assert decide(preemption, 1, [], reached_preemption=True)
    assert not decide(preemption, 1, [])


def optimal(mtbf_secs: float, blocking_secs: float, durable_secs: float) -> Any:
    policy = policies.OptimalIntervalPolicy(mtbf_secs=mtbf_secs)
    policy.observe_save(blocking_secs=blocking_secs, durable_secs=durable_secs)
    return policy


@pytest.mark.parametrize(
    ("mtbf_hours", "minutes"), [(24, 120.0), (6, 60.0), (0.25, 12.247448713915891)]
)
def test_the_optimal_interval_is_sqrt_2bm(mtbf_hours: float, minutes: float) -> None:
    # Five minutes of blocking: Young's sqrt(2 b M); Daly's higher orders give 117, 57 and 9.1.
    policy = optimal(mtbf_hours * 3600, 300, 300)
    assert policy.interval_secs == pytest.approx(minutes * 60, rel=1e-12)


def test_it_is_the_median_time_to_be_durable_if_saves_cost_nothing_and_never_below() -> None:
    assert optimal(3600, 0.001, 20).interval_secs == 20
    assert optimal(3600, 0, 20).interval_secs == 20
    policy = policies.OptimalIntervalPolicy(mtbf_secs=1)
    assert policy.interval_secs == 0
    for durable in (1000, 1000, 3, 1, 2, 5, 4):  # the latest five count
        policy.observe_save(blocking_secs=0, durable_secs=durable)
    assert policy.interval_secs == 3


def test_the_optimal_policy_decides_by_the_given_clock() -> None:
    policy = optimal(mtbf_secs=800, blocking_secs=1, durable_secs=10)  # every 40 s
    assert decide(policy, 1000, [])
    # The last snapshot was taken at 960 and durable, which is its time, at 970.
    assert not decide(policy, 999.9, [970])
    assert decide(policy, 1000, [970])
    assert not decide(policy, 1000, [970], is_saving_in_progress=True)


def test_policies_are_told_what_saves_cost_also_inside_any_of(directory: Path) -> None:
    policy = policies.OptimalIntervalPolicy(mtbf_secs=1e-9)
    with TorchaxCheckpointer(
        directory, save_decision_policy=policies.AnySavePolicy([policy])
    ) as ckpt:
        assert ckpt.save(1, state=STATE)
        assert policy.interval_secs == 0
        ckpt.wait_until_finished()
        ckpt.should_save(2)
        assert 0 < policy._blocking_secs[0] < policy._durable_secs[0] < 60
        assert policy.interval_secs == policy._durable_secs[0]


def train(policy: Any, *, num_steps: int, durable: float, slowdown: float) -> list[float]:
    """A training whose steps take a second by an injected clock; when its saves began.

    A save blocks for a quarter of a second, and steps are slower while it is in flight.
    """
    now, began_at = 1000.0, []
    commits: list[Any] = []
    in_flight: tuple[int, float] | None = None

    for step in range(1, num_steps + 1):
        now += 1 + slowdown if in_flight else 1
        if in_flight and now >= in_flight[1] + durable:
            commits.append(info(in_flight[0], in_flight[1] + durable))
            policy.observe_save(blocking_secs=0.25, durable_secs=durable)
            in_flight = None
        previous = [*commits[-3:], *([info(*in_flight)] if in_flight else [])]
        context = ocp_context(is_saving_in_progress=in_flight is not None)
        if policy.should_save(info(step, now), previous, context=context):
            assert in_flight is None
            in_flight = step, now
            began_at.append(now)
            now += 0.25
    return began_at


@pytest.mark.parametrize("slowdown", [0.0, 0.125, 0.5])
def test_slower_steps_are_measured_and_counted(slowdown: float) -> None:
    policy = policies.OptimalIntervalPolicy(mtbf_secs=20_000)
    began = train(policy, num_steps=5000, durable=40, slowdown=slowdown)
    assert policy._times.slowdown == pytest.approx(slowdown, abs=1e-9)
    cost = 0.25 + 39.75 * slowdown / (1 + slowdown)
    assert policy.cost_secs == pytest.approx(cost, rel=1e-9)
    assert policy.interval_secs == pytest.approx((2 * cost * 20_000) ** 0.5, rel=1e-9)
    # As often as that, but for the step in which it falls due.
    intervals = np.diff(began)[3:]
    assert np.all(intervals >= policy.interval_secs - 1e-6)
    assert np.all(intervals < policy.interval_secs + 2)


def test_saving_without_a_pause_makes_one_in_twenty_to_measure_steps() -> None:
    policy = policies.OptimalIntervalPolicy(mtbf_secs=10)  # as often as storage allows
    began = train(policy, num_steps=5000, durable=10, slowdown=0.25)
    assert policy._times.slowdown == pytest.approx(0.25, abs=1e-9)
    assert policy.interval_secs == 10
    pauses = np.diff(began) > 15
    assert pauses[0]  # nothing is known yet
    assert np.all(np.diff(np.flatnonzero(pauses)) == 20)
    assert np.all(np.diff(began)[pauses] < 23)


def test_a_slowdown_that_is_given_is_not_measured() -> None:
    policy = policies.OptimalIntervalPolicy(mtbf_secs=10, slowdown=0.5)
    began = train(policy, num_steps=500, durable=10, slowdown=0.25)
    assert np.all(np.diff(began) < 13)  # without a pause
    assert policy.cost_secs == pytest.approx(0.25 + 9.75 / 3, rel=1e-12)


def test_steps_longer_than_a_save_show_no_slowdown_and_cost_no_pause() -> None:
    policy = policies.OptimalIntervalPolicy(mtbf_secs=1e-9)
    assert len(train(policy, num_steps=100, durable=0.5, slowdown=0.5)) == 100
    assert policy._times.slowdown == 0


def test_a_pause_of_the_program_does_not_count_as_slow_steps() -> None:
    times = StepTimes()
    for stretch in range(11):
        for step in range(10):
            at = 100.0 * stretch + step + (50 if stretch in (2, 3) and step > 4 else 0)
            saved = stretch // 2
            times.completed(10 * stretch + step, at, is_saving=stretch % 2 == 1, newest_step=saved)
    assert times.slowdown == 0


def test_the_policy_measures_a_training_too(directory: Path) -> None:
    policy = policies.OptimalIntervalPolicy(mtbf_secs=1e-9)
    with TorchaxCheckpointer(directory, save_decision_policy=policy) as ckpt:
        for step in itertools.count(1):
            time.sleep(0.005)
            ckpt.save(step, state={"w": np.zeros(100_000)})
            if step > 200 and ckpt.stats().num_durable > 3:
                break
    assert policy._times.has_quiet
    assert policy.cost_secs > 0


@pytest.mark.parametrize(
    ("kind", "argument", "values"),
    [
        (policies.BestN, "mode", ["least"]),
        (policies.BestN, "n", [0, True]),
        (policies.OptimalIntervalPolicy, "slowdown", [-0.1, float("inf"), float("nan")]),
        (policies.OptimalIntervalPolicy, "mtbf_secs", [0, -1, float("inf"), float("nan")]),
    ],
)
def test_rules_that_make_no_sense_are_refused(kind: Any, argument: str, values: list[Any]) -> None:
    needed = {"metric": "loss"} if kind is policies.BestN else {"mtbf_secs": 1}
    for value in values:
        with pytest.raises(PolicyError, match=argument):
            kind(**{**needed, argument: value})
