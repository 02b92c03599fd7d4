"""Planning: sizes, intervals and goodput, against published anchors and against torch itself."""

from __future__ import annotations

import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import ROOT

from torchax_ckpt import planning, policies
from torchax_ckpt.errors import PlanError
from torchax_ckpt.planning import topology
from torchax_ckpt.planning.sizes import MOMENTS

YEAR_SECS = 365 * 86400.0
times = st.floats(1e-3, 1e5)


def test_planning_is_light_to_import() -> None:
    program = (
        "import sys; from torchax_ckpt import planning; planning.state_bytes(1); "
        "print(sorted({'jax', 'orbax', 'torch', 'torchax', 'matplotlib'} & sys.modules.keys()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ
    )
    assert result.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    assert planning.__all__ == sorted(planning.__all__)
    for name in planning.__all__:
        assert hasattr(planning, name)


# Sizes


def test_a_parameter_under_adamw_takes_twelve_bytes() -> None:
    size = planning.state_bytes(70_000_000_000)
    assert size.parameters_bytes == 280_000_000_000
    assert size.optimizer_bytes == 560_000_000_000
    assert size.total_bytes == 12 * 70_000_000_000


@pytest.mark.parametrize(
    ("settings", "per_param"),
    [
        ({"optimizer": "sgd"}, 4),
        ({"optimizer": "sgd_momentum"}, 8),
        ({"param_bytes": 2}, 6),
        ({"param_bytes": 2, "moment_bytes": 4}, 10),
        ({"param_bytes": 6, "moment_bytes": 4}, 14),
        ({"optimizer": 0.5}, 6),
    ],
)
def test_dtypes_and_factors_are_counted(settings: dict[str, Any], per_param: float) -> None:
    assert planning.state_bytes(1000, **settings).total_bytes == 1000 * per_param


def test_the_ramdisk_of_70b_parameters_on_32_hosts() -> None:
    total_bytes = planning.state_bytes(70_000_000_000).total_bytes
    ramdisk_bytes = planning.ramdisk_bytes_per_host(total_bytes, hosts_per_slice=32)
    assert ramdisk_bytes == 60_375_000_000
    assert f"{ramdisk_bytes / 1e9:.1f} GB" == "60.4 GB"


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "asgd": torch.optim.ASGD,
    "muon": torch.optim.Muon,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "sgd": torch.optim.SGD,
    "sgd_momentum": lambda params: torch.optim.SGD(params, momentum=0.9),
}


@pytest.fixture
def native_torch() -> Any:
    """Torch as it is without torchax: the tensors here need no device."""
    from torch.utils._mode_utils import no_dispatch

    with no_dispatch(), torch._C.DisableTorchFunction():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", sorted(MOMENTS.keys() - {"none"}))
@pytest.mark.usefixtures("native_torch")
def test_moments_are_those_that_torch_keeps(kind: str, dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 8, dtype=dtype))
    optimizer = OPTIMIZERS[kind]([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = [v for v in optimizer.state[weight].values() if torch.is_tensor(v) and v.numel() > 1]
    module = torch.nn.Module()
    module.register_parameter("weight", weight)
    size = planning.module_state_bytes(module, optimizer=kind)
    assert size.optimizer_bytes == sum(v.numel() * v.element_size() for v in state)
    assert size.parameters_bytes == weight.numel() * weight.element_size()


class Tied(torch.nn.Module):
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


@pytest.mark.usefixtures("native_torch")
def test_a_module_is_measured_as_it_is_stored() -> None:
    size = planning.module_state_bytes(Tied())
    assert size.parameters_bytes == 80 * 4 + 5 * 4 + 6 * 2
    assert size.optimizer_bytes == 2 * (80 * 4 + 6 * 2)
    assert size.buffers_bytes == 3 * 8
    assert size.total_bytes == sum((352, 664, 24))
    wide = planning.module_state_bytes(Tied(), moment_bytes=4)
    assert wide.optimizer_bytes == 2 * (80 * 4 + 6 * 4)


def test_a_torchax_module_is_measured_like_any_other() -> None:
    size = planning.module_state_bytes(torch.nn.Linear(8, 2).to("jax"))
    assert size.total_bytes == 12 * 18


# Intervals


@pytest.mark.parametrize(("mtbf_hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_dalys_interval_for_saves_of_five_minutes(mtbf_hours: float, minutes: float) -> None:
    training_secs = planning.daly_training_secs(blocking_secs=300, mtbf_secs=mtbf_hours * 3600)
    assert float(f"{training_secs / 60:.{0 if minutes > 10 else 1}f}") == minutes
    best = planning.best_interval(blocking_secs=300, mtbf_secs=mtbf_hours * 3600)
    assert best.training_secs == training_secs
    assert best.interval_secs == training_secs + 300
    assert not best.is_continuous


def test_the_best_interval_is_not_below_the_time_to_be_durable() -> None:
    best = planning.best_interval(blocking_secs=0.01, durable_secs=60, mtbf_secs=3600)
    assert best.is_continuous
    assert best.interval_secs == 60
    assert best.training_secs == 60 - 0.01
    # Blocking hardly, but slowing steps by 10 %: 5.5 s a save, and 60 s is too often.
    slow = planning.best_interval(blocking_secs=0.01, durable_secs=60, mtbf_secs=3600, slowdown=0.1)
    assert not slow.is_continuous
    assert 190 < slow.interval_secs < 205


def test_the_policy_and_the_plan_share_one_formula() -> None:
    policy = policies.OptimalIntervalPolicy(mtbf_secs=3600)
    policy.observe_save(blocking_secs=2, durable_secs=20)
    planned = planning.OptimalInterval().interval_secs(
        planning.Tier(blocking_secs=2, durable_secs=20), mtbf_secs=3600, step_secs=None
    )
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


@pytest.mark.parametrize(
    ("interval", "blocking", "durable", "restart", "mtbf", "goodput"),
    [
        (60, 2, 50, 600, 10000, 0.9049),
        (600, 6, 120, 600, 10800, 0.9025),
        (120, 6, 120, 600, 10800, 0.8856),
    ],
)
def test_goodput_anchors(
    interval: float, blocking: float, durable: float, restart: float, mtbf: float, goodput: float
) -> None:
    expected = planning.expected_goodput(
        interval_secs=interval,
        blocking_secs=blocking,
        durable_secs=durable,
        restart_secs=restart,
        mtbf_secs=mtbf,
    )
    assert round(expected, 4) == goodput


def test_a_synchronous_save_is_one_that_is_durable_when_it_stops_blocking() -> None:
    # Daly's model: each segment of T survives with exp(-T / M).
    expected = planning.expected_goodput(
        interval_secs=100, blocking_secs=10, durable_secs=10, mtbf_secs=1000, restart_secs=50
    )
    assert expected == pytest.approx(90 / (1050 * math.expm1(0.1)), rel=1e-12)


@given(
    interval=times, durable=st.floats(0, 1), blocking=st.floats(0, 0.9), restart=times,
    over=st.floats(0.1, 1e6), slowdown=st.floats(0, 1), can_fail=st.booleans(),
)  # fmt: skip
def test_goodput_is_a_fraction_that_grows_with_the_mtbf(
    interval: float,
    durable: float,
    blocking: float,
    restart: float,
    over: float,
    slowdown: float,
    can_fail: bool,
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
            restart_can_fail=can_fail,
        )

    mtbf = interval * over
    assert 0 < goodput(mtbf) <= 1 + 1e-12
    assert goodput(mtbf) <= goodput(mtbf * 1.5) * (1 + 1e-9)
    if over >= 1:  # else it is of use that less training lies between two snapshots
        assert goodput(mtbf) <= goodput(mtbf, slowdown=0) * (1 + 1e-9)


# The page that shows it


PAGE = (ROOT / "docs" / "planning.md").read_text()
TABLES = re.findall(r"<!-- ([\w-]+) -->\n(\n\|.*?)<!-- end -->", PAGE, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        pytest.param(*table, marks=[pytest.mark.long] * (table[0] == "published"), id=table[0])
        for table in TABLES
    ],
)
def test_the_page_shows_what_its_script_prints(name: str, shown: str) -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "plans.py"))
    printed = script[name.replace("-", "_")]()
    table = printed[0] if name == "scale" else printed  # which gives what it draws, too
    assert shown.strip() == table, "run benchmarks/plans.py"


def test_every_table_of_the_page_has_a_script() -> None:
    assert [name for name, _ in TABLES] == [
        "sizes",
        "validation",
        "break-even",
        "published",
        "scale",
    ]
    assert PAGE.count("<!-- end -->") == len(TABLES)


def test_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "devices", lambda *args, **options: tuple(jax.devices()))
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    exec("\n".join(blocks), {"model": torch.nn.Linear(8, 2)})


# Bad input

TIER = {"blocking_secs": 1.0, "durable_secs": 10.0}
GOODPUT = {**TIER, "interval_secs": 60.0, "mtbf_secs": 3600.0}
CLUSTER = {"num_chips": 64, "host_mtbf_secs": YEAR_SECS}


@pytest.mark.parametrize(
    ("call", "settings", "message"),
    [
        (planning.Tier, {**TIER, "blocking_secs": -1.0}, r"blocking_secs: expected .* found -1"),
        (
            planning.Tier,
            {**TIER, "durable_secs": 0.5},
            r"durable_secs: .* >= 1, found 0\.5; .*comm",
        ),
        (planning.Tier, {**TIER, "restore_secs": math.inf}, "restore_secs: .* found inf"),
        (planning.Tier, {**TIER, "slowdown": -0.1}, "slowdown: .* 5 % longer"),
        (planning.Tier, {**TIER, "blocking_secs": True}, "blocking_secs: .* found True"),
        (planning.Cluster, {**CLUSTER, "num_chips": 0}, "num_chips: expected a positive int"),
        (planning.Cluster, {**CLUSTER, "num_chips": 66}, "num_chips: .* multiple .* found 66"),
        (planning.Cluster, {**CLUSTER, "num_slices": 3}, "3 slices x 4 chips per host, found 64"),
        (planning.Cluster, {**CLUSTER, "host_mtbf_secs": 0}, "host_mtbf_secs: .* found 0; a year"),
        (planning.Cluster, {**CLUSTER, "restart_secs": -1}, "restart_secs: .* found -1"),
        (planning.Cluster, {**CLUSTER, "process_fraction": 1.5}, "process_fraction: .* 0 to 1"),
        (
            planning.Cluster,
            {**CLUSTER, "process_fraction": 0.7, "cluster_fraction": 0.7},
            r"process_fraction \+ cluster_fraction: .* found 1\.4",
        ),
        (planning.FixedInterval, {}, "either num_steps or secs"),
        (planning.FixedInterval, {"num_steps": 1, "secs": 1.0}, "either num_steps or secs"),
        (planning.FixedInterval, {"num_steps": 0}, "num_steps: expected a positive int, found 0"),
        (planning.FixedInterval, {"secs": 0.0}, "secs: expected a positive number"),
        (planning.Continuous, {"minimum_interval_secs": -30}, "minimum_interval_secs: .* -30"),
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
