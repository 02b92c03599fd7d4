"""Intervals, goodput and sizes: published anchors and a Monte Carlo."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.commands import WITHOUT_TORCH_AND_JAX
from support.processes import run_python

from torchax_ckpt import planning, policies
from torchax_ckpt.errors import PlanError
from torchax_ckpt.policies.closed_forms import MOMENTS


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
        (planning.state_bytes, {"num_params": 7e10}, "num_params: .* found 70000000000.0"),
        (planning.state_bytes, {"num_params": 1, "param_bytes": 0}, "param_bytes: .* float32"),
        (planning.state_bytes, {"num_params": 1, "optimizer": "adamx"}, "adamw.*found 'adamx'"),
        (planning.state_bytes, {"num_params": 1, "optimizer": -2}, "optimizer: .* found -2"),
        (planning.module_state_bytes, {"module": 70}, "torch.nn.Module, found int; .*state_bytes"),
        (
            planning.ramdisk_bytes_per_host,
            {"total_bytes": 1, "hosts_per_slice": 0},
            "hosts_per_slice: .* found 0; each slice",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    call: Callable[..., Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        call(**settings)


def test_a_parameter_under_adamw_takes_twelve_bytes() -> None:
    size = planning.state_bytes(70_000_000_000)
    assert (size.parameters_bytes, size.optimizer_bytes) == (280_000_000_000, 560_000_000_000)
    assert size.total_bytes == 12 * 70_000_000_000
    assert planning.module_state_bytes(torch.nn.Linear(8, 2).to("jax")).total_bytes == 12 * 18
    settings: list[tuple[dict[str, Any], int]] = [
        ({"optimizer": "sgd"}, 4),
        ({"param_bytes": 2}, 6),
        ({"param_bytes": 6, "moment_bytes": 4}, 14),
        ({"optimizer": 0.5}, 6),
    ]
    for setting, per_param in settings:
        assert planning.state_bytes(1000, **setting).total_bytes == 1000 * per_param


def test_the_ramdisk_of_70b_parameters_on_32_hosts() -> None:
    size = 840_000_000_000
    assert planning.ramdisk_bytes_per_host(size, hosts_per_slice=32) == 60_375_000_000
    kept = planning.ramdisk_bytes_per_host(size, hosts_per_slice=32, num_copies=3)
    assert kept == 90_562_500_000
    assert planning.ramdisk_bytes_per_host(1, hosts_per_slice=3) == 1  # whole bytes, rounded up


@pytest.fixture
def native_torch() -> Any:
    """Torch as it is without torchax: the tensors here need no device."""
    from torch.utils._mode_utils import no_dispatch

    with no_dispatch(), torch._C.DisableTorchFunction():
        yield


@pytest.mark.parametrize("kind", sorted(MOMENTS.keys() - {"none"}))
@pytest.mark.usefixtures("native_torch")
def test_moments_are_those_that_torch_keeps(kind: str) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16))
    name, _, momentum = kind.partition("_")
    kinds = {name.lower(): found for name, found in vars(torch.optim).items()}
    optimizer = kinds[name]([weight], **({"momentum": 0.9} if momentum else {}))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = [v for v in optimizer.state[weight].values() if torch.is_tensor(v) and v.numel() > 1]
    module = torch.nn.Module()
    module.register_parameter("weight", weight)
    size = planning.module_state_bytes(module, optimizer=kind)
    assert size.optimizer_bytes == sum(v.numel() * v.element_size() for v in state)
    assert size.parameters_bytes == weight.numel() * weight.element_size()


class Mixed(torch.nn.Module):
    """A tied weight, a frozen one, another dtype, and buffers, one of them not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 8)
        self.head = torch.nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = torch.nn.Parameter(torch.zeros(5), requires_grad=False)
        self.narrow = torch.nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(100), persistent=False)

    def get_extra_state(self) -> Any:
        return {"epoch": 3}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError


@pytest.mark.usefixtures("native_torch")
def test_a_module_is_measured_as_it_is_stored() -> None:
    size = planning.module_state_bytes(Mixed())
    assert size.parameters_bytes == 80 * 4 + 5 * 4 + 6 * 2
    assert size.optimizer_bytes == 2 * (80 * 4 + 6 * 2)
    assert size.buffers_bytes == 3 * 8
    assert size.total_bytes == sum((352, 664, 24))
    wide = planning.module_state_bytes(Mixed(), moment_bytes=4)
    assert wide.optimizer_bytes == 2 * (80 * 4 + 6 * 4)
