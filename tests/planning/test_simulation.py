"""The simulated run, against the closed forms and against a simulation event by event."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.event_by_event import EventByEvent

from torchax_ckpt.errors import PlanError
from torchax_ckpt.planning import (
    Cluster,
    Continuous,
    Failure,
    FixedInterval,
    OptimalInterval,
    Outcome,
    Policy,
    Run,
    Tier,
    TwoTier,
    compare,
    draw_failures,
    expected_goodput,
    simulate,
)
from torchax_ckpt.planning.schedule import Schedule

BUCKET = Tier(blocking_secs=2, durable_secs=50, restore_secs=60)
RAMDISK = Tier(blocking_secs=0.5, durable_secs=3, restore_secs=5)


def cluster(mtbf_secs: float, **settings: Any) -> Cluster:
    """One with this mean time between failures."""
    slices = settings.get("num_slices", 1)
    return Cluster(num_chips=4 * slices, host_mtbf_secs=mtbf_secs * slices, **settings)


# Against the closed forms


@pytest.mark.parametrize("restart_can_fail", [False, True])
@pytest.mark.parametrize("slowdown", [0.0, 0.2])
@pytest.mark.parametrize(
    ("interval", "blocking", "durable", "restart", "mtbf"),
    [(60, 2, 50, 600, 10000), (600, 6, 120, 600, 10800), (120, 6, 120, 600, 10800)],
)
def test_it_agrees_with_the_closed_form_to_half_a_percent(
    interval: float,
    blocking: float,
    durable: float,
    restart: float,
    mtbf: float,
    slowdown: float,
    restart_can_fail: bool,
) -> None:
    tier = Tier(blocking_secs=blocking, durable_secs=durable, slowdown=slowdown)
    run = Run(
        cluster=cluster(mtbf, restart_secs=restart, restart_can_fail=restart_can_fail),
        durable=tier,
    )
    outcome = simulate(run, FixedInterval(secs=interval), duration_secs=20_000 * mtbf)
    expected = expected_goodput(
        interval_secs=interval,
        blocking_secs=blocking,
        durable_secs=durable,
        restart_secs=restart,
        mtbf_secs=mtbf,
        slowdown=slowdown,
        restart_can_fail=restart_can_fail,
    )
    assert outcome.goodput == pytest.approx(expected, rel=0.005)
    assert outcome.interval_secs == pytest.approx(interval)


@pytest.mark.parametrize(("kind", "tier"), [("process", RAMDISK), ("cluster", BUCKET)])
def test_two_tiers_are_the_tier_that_all_failures_are_restored_from(kind: str, tier: Tier) -> None:
    free = {"blocking_secs": 0.0, "slowdown": 0.0}
    run = Run(
        cluster=cluster(3000, restart_secs=100, **{f"{kind}_fraction": 1.0}),
        durable=BUCKET if tier is BUCKET else dataclasses.replace(BUCKET, **free),
        local=RAMDISK if tier is RAMDISK else dataclasses.replace(RAMDISK, **free),
    )
    # Of the bucket's 150 s between saves, 148 are training: eight local intervals.
    local_secs = 18.5 + (0.5 if tier is RAMDISK else 0)
    policy = TwoTier(local=FixedInterval(secs=local_secs), durable=FixedInterval(secs=150))
    outcome = simulate(run, policy, duration_secs=20_000 * 3000)
    expected = expected_goodput(
        interval_secs=local_secs if tier is RAMDISK else 150,
        blocking_secs=tier.blocking_secs,
        durable_secs=tier.durable_secs,
        restart_secs=100 + tier.restore_secs,
        mtbf_secs=3000,
    )
    assert outcome.goodput == pytest.approx(expected, rel=0.005)
    assert outcome.num_local_restores == pytest.approx(
        outcome.num_failures if tier is RAMDISK else 0, abs=300
    )


# Against a simulation that knows no schedule


SETTINGS = [
    (FixedInterval(secs=97.0), 1),
    (Continuous(minimum_interval_secs=0.01), 1),
    (OptimalInterval(), 2),
    (TwoTier(local=FixedInterval(secs=7.0), durable=FixedInterval(secs=97.0)), 2),
    (TwoTier(local=FixedInterval(secs=7.0), durable=FixedInterval(secs=400.0)), 1),
    (TwoTier(local=Continuous(minimum_interval_secs=0.01), durable=Continuous()), 2),
    (TwoTier(local=OptimalInterval(), durable=OptimalInterval()), 2),
]


@pytest.mark.parametrize("step_secs", [None, 1.7])
@pytest.mark.parametrize("restart_can_fail", [False, True])
@pytest.mark.parametrize(("policy", "num_slices"), SETTINGS)
def test_it_agrees_with_a_simulation_event_by_event(
    policy: Any, num_slices: int, restart_can_fail: bool, step_secs: float | None
) -> None:
    run = Run(
        cluster=cluster(
            400,
            num_slices=num_slices,
            restart_secs=80,
            process_fraction=0.3,
            cluster_fraction=0.2,
            restart_can_fail=restart_can_fail,
        ),
        durable=dataclasses.replace(BUCKET, slowdown=0.1),
        local=dataclasses.replace(RAMDISK, slowdown=0.3),
        step_secs=step_secs,
    )
    schedule = Schedule(run, policy)
    failures = draw_failures(run.cluster, duration_secs=100_000, seed=1)
    outcome = simulate(run, policy, failures=failures, duration_secs=100_000)
    slow = EventByEvent(
        run, isinstance(policy, TwoTier), schedule.training_secs, schedule.saves_per_durable
    )
    slow.play(failures, 100_000)
    assert outcome.num_failures == slow.num_failures > 100
    assert outcome.num_local_restores == slow.num_local
    assert outcome.lost_secs == pytest.approx(slow.lost, rel=1e-9)
    assert outcome.down_secs == pytest.approx(slow.down, rel=1e-9)
    begun = outcome.trained_secs / schedule.training_secs
    assert math.floor(begun + 1e-9) == slow.position


# What holds of every run


def parts(outcome: Outcome) -> float:
    return outcome.trained_secs + outcome.saving_secs + outcome.lost_secs + outcome.down_secs


tiers = st.builds(
    lambda blocking, rest, restore, slowdown: Tier(
        blocking_secs=blocking,
        durable_secs=blocking + rest,
        restore_secs=restore,
        slowdown=slowdown,
    ),
    st.floats(0, 5),
    st.floats(0.01, 60),
    st.floats(0, 100),
    st.floats(0, 0.5),
)
intervals = st.one_of(
    st.builds(FixedInterval, secs=st.floats(10, 500)),
    st.builds(FixedInterval, num_steps=st.integers(1, 200)),
    st.builds(Continuous, minimum_interval_secs=st.floats(0.1, 60)),
    st.builds(OptimalInterval, counts_slowdown=st.booleans()),
)
clusters = st.builds(
    cluster,
    st.floats(200, 1e5),
    num_slices=st.integers(1, 3),
    restart_secs=st.floats(0, 500),
    process_fraction=st.floats(0.01, 0.5),
    cluster_fraction=st.floats(0.01, 0.4),
    restart_can_fail=st.booleans(),
)
runs = st.builds(Run, cluster=clusters, durable=tiers, local=tiers, step_secs=st.floats(0.5, 20))


@settings(max_examples=60)
@given(
    run=runs, policy=st.one_of(intervals, st.builds(TwoTier, local=intervals, durable=intervals))
)
def test_time_goes_somewhere_and_a_trace_replays_to_the_same_outcome(run: Run, policy: Any) -> None:
    duration = 30 * run.cluster.mtbf_secs
    outcome = simulate(run, policy, duration_secs=duration, seed=5)
    assert parts(outcome) == pytest.approx(duration, rel=1e-9)
    assert 0 <= outcome.goodput <= 1
    for part in (outcome.trained_secs, outcome.saving_secs, outcome.lost_secs, outcome.down_secs):
        assert part >= -1e-6
    trace = draw_failures(run.cluster, duration_secs=duration, seed=5)
    assert simulate(run, policy, failures=iter(trace), duration_secs=duration) == outcome


@settings(max_examples=60)
@given(run=runs, secs=st.floats(70, 500), num_local=st.integers(1, 20))
def test_a_local_tier_that_costs_nothing_more_does_no_harm(
    run: Run, secs: float, num_local: int
) -> None:
    # No failure takes all copies, so that every restore is from a newer snapshot than without.
    run = dataclasses.replace(
        run,
        cluster=cluster(500, num_slices=2, restart_secs=100, process_fraction=0.5),
        local=Tier(blocking_secs=0, durable_secs=0, restore_secs=run.durable.restore_secs),
        step_secs=None,
    )
    alone = FixedInterval(secs=secs)
    training_secs = secs - run.durable.cost_secs
    both = TwoTier(local=FixedInterval(secs=training_secs / num_local), durable=alone)
    failures = draw_failures(run.cluster, duration_secs=20_000)
    goodputs = [
        simulate(run, policy, failures=failures, duration_secs=20_000).goodput
        for policy in (alone, both)
    ]
    assert goodputs[1] >= goodputs[0] - 1e-9


def test_equal_costs_and_equal_intervals_are_the_same_run() -> None:
    # What the durable tier alone costs is paid to the local tier; from there it is uploaded.
    run = Run(
        cluster=cluster(500, restart_secs=30, num_slices=2, cluster_fraction=0.5),
        durable=BUCKET,
    )
    both = dataclasses.replace(
        run, local=BUCKET, durable=dataclasses.replace(BUCKET, blocking_secs=0.0)
    )
    policy = FixedInterval(secs=60)
    alone = simulate(run, policy)
    assert simulate(
        both, TwoTier(local=policy, durable=FixedInterval(secs=58))
    ).goodput == pytest.approx(alone.goodput, rel=1e-12)


def test_without_failures_only_saves_cost_time() -> None:
    run = Run(cluster=cluster(1e9), durable=BUCKET)
    outcome = simulate(run, FixedInterval(secs=100), failures=[], duration_secs=100_000)
    assert outcome.goodput == pytest.approx(0.98, abs=1e-4)
    assert outcome.num_failures == outcome.lost_secs == outcome.down_secs == 0


def test_one_failure_by_hand() -> None:
    run = Run(cluster=cluster(1e9, restart_secs=40), durable=BUCKET)
    # Snapshots begin at 98, 198, 298; the last is not durable at 340, so 198 is restored.
    outcome = simulate(
        run, FixedInterval(secs=100), failures=[Failure(340.0)], duration_secs=340 + 100 + 98
    )
    assert outcome.lost_secs == 340 - 198
    assert outcome.saving_secs == 2
    assert outcome.down_secs == 100
    assert outcome.trained_secs == 3 * 98


def test_saves_to_one_tier_do_not_overlap_and_begin_between_steps() -> None:
    run = Run(cluster=cluster(1e6), durable=BUCKET, step_secs=7)
    outcome = simulate(run, FixedInterval(num_steps=1))
    assert outcome.interval_secs == 7 * 7 + 2  # the first whole step after 50 s
    assert simulate(run, Continuous()) == outcome
    assert simulate(run, FixedInterval(num_steps=100)).interval_secs == 702


def test_failures_come_as_often_as_the_hosts_make_them() -> None:
    machines = Cluster(
        num_chips=1024, num_slices=4, host_mtbf_secs=2.56e6, process_fraction=0.5,
        cluster_fraction=0.1,
    )  # fmt: skip
    assert machines.num_hosts == 256
    assert machines.hosts_per_slice == 64
    assert machines.mtbf_secs == 10_000
    failures = draw_failures(machines, duration_secs=1e8, seed=3)
    assert len(failures) == pytest.approx(10_000, rel=0.03)
    kinds = [failure.kind for failure in failures]
    assert kinds.count("process") / len(kinds) == pytest.approx(0.5, abs=0.02)
    assert kinds.count("cluster") / len(kinds) == pytest.approx(0.1, abs=0.01)
    assert failures == sorted(failures, key=lambda failure: failure.at_secs)
    assert failures == draw_failures(machines, duration_secs=1e8, seed=3)
    assert failures != draw_failures(machines, duration_secs=1e8, seed=4)


def test_policies_are_compared_from_64_to_100_000_chips_on_the_same_failures() -> None:
    run = Run(
        cluster=Cluster(
            num_chips=64, num_slices=2, host_mtbf_secs=365 * 86400, restart_secs=300,
            process_fraction=0.2, cluster_fraction=0.02,
        ),
        durable=dataclasses.replace(BUCKET, slowdown=0.05),
        local=RAMDISK,
    )  # fmt: skip
    policies: dict[str, Policy | TwoTier] = {
        "fixed": FixedInterval(secs=1800),
        "continuous": Continuous(),
        "optimal": OptimalInterval(),
        "two-tier": TwoTier(local=OptimalInterval(), durable=OptimalInterval()),
    }
    rows = compare(run, policies, num_chips=[64, 4096, 100_000])
    goodput = {(row.num_chips, row.policy): row.goodput for row in rows}
    assert len(goodput) == 12
    for name in policies:
        assert goodput[64, name] > goodput[4096, name] > goodput[100_000, name] > 0
    for size in (64, 4096, 100_000):
        assert goodput[size, "optimal"] >= goodput[size, "continuous"] - 1e-3
        assert goodput[size, "optimal"] >= goodput[size, "fixed"] - 1e-3
        assert goodput[size, "two-tier"] >= goodput[size, "optimal"] - 1e-3
    assert goodput[100_000, "two-tier"] > goodput[100_000, "optimal"] + 0.01
    for row in rows:
        least, most = row.goodput_range
        assert least <= row.goodput <= most
        assert most - least < 0.02


# Bad input

RUN = Run(cluster=cluster(1000), durable=BUCKET)


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        (FixedInterval(num_steps=5), {}, r"FixedInterval\(num_steps=5\): .* Run\(step_secs=None"),
        (
            TwoTier(local=Continuous(), durable=Continuous()),
            {},
            r"expected a local tier, found None; give Run\(local",
        ),
        (Continuous(), {"failures": []}, "duration_secs: .* found None; a trace of failures"),
        (Continuous(), {"duration_secs": -1.0}, "duration_secs: .* found -1"),
        (
            Continuous(),
            {"failures": [Failure(5.0), Failure(4.0)], "duration_secs": 9.0},
            "at_secs: expected a number >= 5, found 4.0; sort the trace",
        ),
        (
            Continuous(),
            {"failures": [Failure(5.0, "host")], "duration_secs": 9.0},  # type: ignore[arg-type]
            "kind: expected one of process, slice, cluster, found 'host'",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    policy: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        simulate(RUN, policy, **settings)


def test_an_optimal_interval_needs_failures_to_be_optimal_for() -> None:
    run = Run(
        cluster=cluster(1000, num_slices=2), durable=BUCKET, local=RAMDISK
    )  # the other slice always has a copy
    with pytest.raises(PlanError, match=r"OptimalInterval: .* No failure .* FixedInterval"):
        simulate(run, TwoTier(local=OptimalInterval(), durable=OptimalInterval()))


def test_saves_that_leave_no_time_to_train_are_refused() -> None:
    run = Run(cluster=cluster(1000), durable=Tier(blocking_secs=5, durable_secs=5))
    with pytest.raises(PlanError, match="interval of Continuous: .* no time to train"):
        simulate(run, Continuous())


@pytest.mark.parametrize("step_secs", [0, -1.0])
def test_steps_take_time(step_secs: float) -> None:
    with pytest.raises(PlanError, match="step_secs: expected a positive number"):
        Run(cluster=cluster(1000), durable=BUCKET, step_secs=step_secs)
