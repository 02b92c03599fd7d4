"""Intervals and goodput: published anchors, a Monte Carlo, and the page that shows them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ROOT
from support.commands import BLOCK, WITHOUT_TORCH_AND_JAX
from support.processes import run_python

from torchax_ckpt import planning, policies
from torchax_ckpt.errors import PlanError

times = st.floats(1e-3, 1e5)


def test_the_formulas_need_neither_torch_nor_jax() -> None:
    program = WITHOUT_TORCH_AND_JAX + (
        "from torchax_ckpt import planning\n"
        "best = planning.best_interval(blocking_secs=300, mtbf_secs=3600)\n"
        "print(best.interval_secs, planning.state_bytes(3).total_bytes)\n"
        "planning.on_topology\n"
    )
    result = run_python(program, check=False, fresh=True)
    assert result.stdout.split()[1] == "36"
    assert "ModuleNotFoundError: import of jax halted" in result.stderr  # the check can fail


@pytest.mark.parametrize(("mtbf_hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_dalys_interval_for_saves_of_five_minutes(mtbf_hours: float, minutes: float) -> None:
    training_secs = planning.daly_training_secs(blocking_secs=300, mtbf_secs=mtbf_hours * 3600)
    assert float(f"{training_secs / 60:.{0 if minutes > 10 else 1}f}") == minutes
    best = planning.best_interval(blocking_secs=300, mtbf_secs=mtbf_hours * 3600)
    assert best.interval_secs == training_secs + 300
    assert not best.is_continuous


def test_the_best_interval_is_not_below_the_time_to_be_durable() -> None:
    best = planning.best_interval(blocking_secs=0.01, durable_secs=60, mtbf_secs=3600)
    assert best == planning.BestInterval(interval_secs=60, is_continuous=True)
    # Blocking hardly, but slowing steps by 10 %: 5.5 s a save, and 60 s is too often.
    slow = planning.best_interval(blocking_secs=0.01, durable_secs=60, mtbf_secs=3600, slowdown=0.1)
    assert not slow.is_continuous
    assert 190 < slow.interval_secs < 205
    # The policy shares the formula.
    policy = policies.OptimalIntervalPolicy(mtbf_secs=3600)
    policy.observe_save(blocking_secs=2, durable_secs=20)
    planned = planning.young_interval_secs(blocking_secs=2, durable_secs=20, mtbf_secs=3600)
    assert policy.interval_secs == planned == 120


@given(
    blocking=st.floats(0.01, 100), over=st.floats(3, 1e5), durable=st.floats(0, 0.9),
    restart=st.floats(0, 1e4),
)  # fmt: skip
def test_no_other_interval_has_a_better_goodput(
    blocking: float, over: float, durable: float, restart: float
) -> None:
    mtbf = blocking * over
    best = planning.best_interval(blocking_secs=blocking, mtbf_secs=mtbf).interval_secs
    durable_secs = blocking + durable * (best - blocking)

    def goodput(interval: float) -> float:
        return planning.expected_goodput(
            interval_secs=max(interval, durable_secs),
            blocking_secs=blocking,
            durable_secs=durable_secs,
            restart_secs=restart,
            mtbf_secs=mtbf,
        )

    others = [goodput(best * 1.02**i) for i in range(-40, 41)]
    assert goodput(best) >= max(others) * (1 - 1e-4)


ANCHORS: dict[tuple[float, ...], float] = {
    (60, 2, 50, 600, 10000, 0.0): 0.9049,
    (600, 6, 120, 600, 10800, 0.0): 0.9025,
    (120, 6, 120, 600, 10800, 0.0): 0.8856,
}
"""T, b, P, R, M and the slowdown -> the goodput, to four digits."""


def kept_secs(uptime: float, save: dict[str, float], interval: float) -> float:
    """Trains and saves until a failure; returns the training, at full speed, that is durable."""
    blocking, durable, slowdown = save.values()
    in_flight = (durable - blocking) / (1 + slowdown)  # trained while steps are slower
    training = in_flight + interval - durable
    now = trained = training  # after a restart, no save is in flight
    kept = 0.0
    while now + durable <= uptime:
        kept, trained = trained, trained + training
        now += durable + (training - in_flight)
    return kept


@pytest.mark.parametrize(
    "case", [*ANCHORS, (120, 2, 50, 600, 10000, 0.2), (120, 6, 120, 0, 500, 0.1),
             (100, 10, 10, 50, 1000, 0.0)],
)  # fmt: skip
def test_the_closed_form_is_the_goodput_of_a_simulated_run(case: tuple[float, ...]) -> None:
    interval, blocking, durable, restart, mtbf, slowdown = case
    save = {"blocking_secs": blocking, "durable_secs": durable, "slowdown": slowdown}
    expected = planning.expected_goodput(
        interval_secs=interval, restart_secs=restart, mtbf_secs=mtbf, **save
    )
    if case in ANCHORS:
        assert round(expected, 4) == ANCHORS[case]
    # From a restart to the next, training is kept that is `expected` of the wall time on average.
    uptimes = np.random.default_rng(0).exponential(mtbf, 10_000)
    errors = [kept_secs(u, save, interval) - expected * (u + restart) for u in uptimes]
    error = np.mean(errors) / (mtbf + restart)
    standard_error = np.std(errors) / math.sqrt(len(errors)) / (mtbf + restart)
    assert 3 * standard_error < 0.01  # so an error of a hundredth of the time fails
    assert abs(error) < 3 * standard_error


@given(
    interval=times, durable=st.floats(0, 1), blocking=st.floats(0, 0.9), restart=times,
    over=st.floats(0.1, 1e6), slowdown=st.floats(0, 1),
)  # fmt: skip
def test_goodput_is_a_fraction_that_grows_with_the_mtbf(
    interval: float, durable: float, blocking: float, restart: float, over: float, slowdown: float
) -> None:
    durable_secs = interval * durable

    def goodput(mtbf_secs: float, slowdown: float = slowdown) -> float:
        return planning.expected_goodput(
            interval_secs=interval,
            blocking_secs=durable_secs * blocking,
            durable_secs=durable_secs,
            restart_secs=min(restart, 10 * interval),
            mtbf_secs=mtbf_secs,
            slowdown=slowdown,
        )

    mtbf = interval * over
    assert 0 < goodput(mtbf) <= 1 + 1e-12
    assert goodput(mtbf) <= goodput(mtbf * 1.5) * (1 + 1e-9)
    if over >= 1:  # else it is of use that less training lies between two snapshots
        assert goodput(mtbf) <= goodput(mtbf, slowdown=0) * (1 + 1e-9)


def test_the_page_shows_what_its_programs_print(capsys: pytest.CaptureFixture[str]) -> None:
    _, section = (ROOT / "docs" / "planning.md").read_text().split("## Save interval")
    blocks = [(block["kind"], block["body"]) for block in BLOCK.finditer(section)]
    names = {"planning": planning}
    for kind, body in blocks:
        if kind == "python":
            exec(body, names)
    shown = [body for kind, body in blocks if kind == "text" and not body.startswith("G = ")]
    assert capsys.readouterr().out == "".join(shown) != ""


SAVE = {"blocking_secs": 1.0, "durable_secs": 10.0}
GOODPUT = {**SAVE, "interval_secs": 60.0, "mtbf_secs": 3600.0}


@pytest.mark.parametrize(
    ("call", "settings", "message"),
    [
        (planning.save_cost_secs, {**SAVE, "blocking_secs": -1.0}, "blocking_secs: .* found -1"),
        (planning.save_cost_secs, {**SAVE, "durable_secs": 0.5}, r">= 1, found 0\.5; .*commit"),
        (planning.save_cost_secs, {**SAVE, "slowdown": -0.1}, "slowdown: .* 5 % longer"),
        (planning.save_cost_secs, {**SAVE, "blocking_secs": True}, "blocking_secs: .* found True"),
        (planning.expected_goodput, {**GOODPUT, "interval_secs": 9}, "interval_secs: .* >= 10"),
        (planning.expected_goodput, {**GOODPUT, "mtbf_secs": math.nan}, "mtbf_secs: .* nan"),
        (planning.expected_goodput, {**GOODPUT, "restart_secs": -1}, "restart_secs: .* -1"),
        (planning.best_interval, {"blocking_secs": 0, "mtbf_secs": 9}, "measure one"),
        (planning.best_interval, {"blocking_secs": 1, "mtbf_secs": 0}, "mtbf_secs: .* found 0"),
    ],
)
def test_what_cannot_be_is_refused(
    call: Callable[..., Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        call(**settings)
