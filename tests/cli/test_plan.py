"""``torchax-ckpt plan``: the library's numbers, with CPU devices in place of a topology's chips."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from support import synthetic
from support.commands import run, run_json, run_main
from support.steps import save_states
from typer.testing import CliRunner

from torchax_ckpt import LocalTier, planning
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.cli.app import app
from torchax_ckpt.cli.exit_codes import UsageError
from torchax_ckpt.cli.step_arguments import parsed_count, parsed_secs, parsed_size
from torchax_ckpt.telemetry.events import Event

TIMES = ("--blocking", "1s", "--durable", "2min", "--slowdown", 0.05, "--restart", "5min")
LARGE = ("plan", "--params", "70B", "--chips", 4096, "--slices", 2, *TIMES)
SAVE = {"blocking_secs": 1.0, "durable_secs": 120.0, "slowdown": 0.05}


def test_a_plan_says_what_the_library_says() -> None:
    mtbf_secs = 365 * 86_400 / 1024
    best = planning.best_interval(mtbf_secs=mtbf_secs, **SAVE)
    assert run_json(*LARGE) == {
        "checkpoint_bytes": planning.state_bytes(70_000_000_000).total_bytes,
        "hosts": 1024,
        "hosts_per_slice": 512,
        "ramdisk_bytes_per_host": planning.ramdisk_bytes_per_host(
            840_000_000_000, hosts_per_slice=512, num_copies=LocalTier("ramdisk").keep + 1
        ),
        "write_bytes_per_sec_and_host": 840_000_000_000 / 1024 / 120,
        "mtbf_secs": mtbf_secs,
        "restart_secs": 300,
        "restore_secs": 120,  # reading takes as long as writing, unless it was measured
        **SAVE,
        "save_cost_secs": planning.save_cost_secs(**SAVE),
        "best_interval_secs": best.interval_secs,
        "best_is_continuous": False,
        "expected_goodput": planning.expected_goodput(
            interval_secs=best.interval_secs, mtbf_secs=mtbf_secs, restart_secs=300 + 120, **SAVE
        ),
        "measured": [],
    }
    assert run_json(*LARGE, "--mtbf", "2.5h")["mtbf_secs"] == 9000


def test_a_number_of_parameters_without_its_letter_is_asked_about(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for params, asks in (("7", True), ("7B", False), ("1000", False)):
        words = ("plan", "--params", params, "--blocking", "1s", "--durable", "2min")
        assert run_main(monkeypatch, *words) == 0
        assert ("is 7B meant?" in capsys.readouterr().err) is asks


def test_a_table_for_people() -> None:
    said = dict(re.split(r" {2,}", line.strip()) for line in run(*LARGE).splitlines()[1:])
    assert said["one checkpoint"] == "840 GB"
    assert said["ramdisk of each host, keep=2"] == "5.66 GB"
    assert said["each host writes"] == "6.84 MB/s"
    assert said["restart, then restore"] == "5 min + 2 min"
    assert said["best interval"] == "11 min"
    assert said["a save costs, with slower steps"] == "6.67 s"
    often = run("plan", "--params", "1M", "--mtbf", "1h", "--blocking", "5ms", "--durable", "30s")
    assert re.search(r"best interval +30 s, which is to save continuously", often)


def test_a_plan_from_what_a_run_has_recorded(directory: Path, tmp_path: Path) -> None:
    synthetic.three_runs(directory)
    said = run_json("plan", "--run", directory, "--chips", 64)
    assert said["measured"] == ["blocking_secs", "durable_secs", "num_bytes", "restore_secs"]
    assert said["restore_secs"] == 21.5
    assert 1.49e9 < said["checkpoint_bytes"] < 1.5e9
    assert 30 < said["durable_secs"] < 50
    # What is said counts.
    assert run_json("plan", "--run", directory, "--durable", "60")["durable_secs"] == 60
    assert "(measured)" in run("plan", "--run", directory)
    # What a local tier restored says nothing of the durable one.
    told = synthetic.run(first=25, last=500, at_secs=synthetic.BEGAN_SECS)
    local = Event("restored", told[0].time_secs - 1, 25, {"restore_secs": 0.1, "tier": "local"})
    synthetic.write(tmp_path / "local", [[local] * 3 + told])
    assert run_json("plan", "--run", tmp_path / "local")["restore_secs"] == 21.5


def test_what_saves_did_not_write_is_not_counted_as_written(directory: Path) -> None:
    sizes = {"num_bytes": 10_000, "new_bytes": 100}
    values = {"blocking_secs": 0.1, "durable_secs": 2.0, **sizes}
    synthetic.write(directory, [[Event("durable", synthetic.BEGAN_SECS, 1, values)]])
    said = run_json("plan", "--run", directory)
    assert said["checkpoint_bytes"] == 10_000
    assert said["write_bytes_per_sec_and_host"] * said["hosts"] == 50
    said = run_json("plan", "--run", directory, "--params", "1B")
    assert said["measured"] == ["blocking_secs", "durable_secs"]  # no sizes
    assert said["write_bytes_per_sec_and_host"] * said["hosts"] == 6e9


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose newest step has arrays on devices and on the host."""
    states = {
        step: {
            "weights": jax.numpy.ones((64, 16 * step // 10), jax.numpy.bfloat16),
            "on_host": np.ones((1024, 1024)),
            "count": step,
        }
        for step in (10, 20)
    }
    return save_states(tmp_path_factory.mktemp("run") / "a", states)


def test_a_plan_from_a_real_run(saved: Path) -> None:
    said = run_json("plan", "--run", saved)
    assert {"blocking_secs", "durable_secs", "num_bytes"} <= set(said["measured"])
    assert said["checkpoint_bytes"] > 8 << 20
    assert said["restore_secs"] == said["durable_secs"] > 0  # no restore was recorded


@pytest.mark.usefixtures("eight_chips")
def test_the_newest_step_or_the_chosen_step_is_planned_on_a_topology(saved: Path) -> None:
    said = run_json("plan", "--topology", "v5e:2x4", "--run", saved, "--training", "1GiB")
    leaves = {
        "state/weights": jax.ShapeDtypeStruct((64, 32), jax.numpy.bfloat16),
        "random/jax": jax.ShapeDtypeStruct((2,), jax.numpy.uint32),  # the library's own
    }
    plan = dataclasses.asdict(planning.on_topology(leaves, "v5e:2x4", training_bytes=1 << 30))
    del plan["compile_secs"]
    assert said.pop("compile_secs") > 0
    assert said == {"step": 20, **plan}
    assert said["state_bytes"] == 64 * 32 * 2 + 8
    said = run_json("plan", "--topology", "v5e:2x2", "--run", saved / "10", "--slices", 2)
    assert (said["step"], said["axes"]) == (10, {"slice": 2, "fsdp": 4})


@pytest.mark.usefixtures("eight_chips")
def test_a_table_of_a_topology_says_where_figures_come_from(saved: Path) -> None:
    asked = ("plan", "--topology", "v5e:2x4", "--run", saved)
    said = {r[0]: r[1:] for r in (re.split(r" {2,}", x.strip()) for x in run(*asked).splitlines())}
    assert said["v5e:2x4"] == ["source"]
    assert said["chips"] == ["8, 8 on each host; fsdp=8", "given"]
    assert said["state of step 20"] == ["4.1 kB in 2 leaves", "stored"]
    assert said["HBM of a chip"] == ["17.2 GB", "published"]
    assert said["state on a chip"] == ["520 B", "compiled"]
    assert said["copies of a save on a chip"] == ["520 B, made if 650 B are free", "compiled"]
    assert said['snapshot="auto" takes'] == ["a snapshot by copy", "computed"]
    assert said["programs of a save"][0].startswith("2, compiled in ")
    full = (16_125 << 20) - 520  # nothing is free beside the state
    lines = run(*asked, "--training", full).splitlines()
    rows = [re.split(r" {2,}", line.strip()) for line in lines]
    assert ['snapshot="auto" takes', "a snapshot by offload", "computed"] in rows
    assert ["its memory of a host", "at most 8.26 kB", "compiled"] in rows


@pytest.mark.usefixtures("eight_chips")
def test_a_state_that_does_not_fit_is_found(saved: Path) -> None:
    asked = ["plan", "--topology", "v5e:2x4", "--run", str(saved), "--training", "20GiB"]
    assert run_json(*asked, code=exit_codes.FOUND)["fits"] is False
    result = CliRunner().invoke(app, asked)
    assert "snapshot" not in result.stdout
    missing = (20 << 30) + 520 - (16_125 << 20)
    assert f"fit on v5e:2x4: it and the training need {missing} bytes more" in result.stderr
    assert "take as many chips of a generation with more memory (v4, v5p, v6e)" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("", "give --params 70B, or --run DIRECTORY"),
        ("--params many", "--params: expected a number such as 70B"),
        ("--params 1B", "give --durable"),
        ("--params 1B --durable 2min", "give --blocking"),
        ("--params 1B --durable soon --blocking 1", "--durable: expected a time such as"),
        ("--params 1B --durable 1 --blocking 2", "durable_secs"),
        ("--params 1B --durable 0 --blocking 0", "expected a time above 0"),
        ("--params 1B --durable 2 --blocking 1 --chips 7 --slices 2", "of the 2 slices, found 7"),
        ("--params 1B --durable 2 --blocking 1 --slices 3", "of the 3 slices, found 4"),
        ("--params 1B --durable 2 --blocking 1 --slowdown -1", "slowdown"),
        ("--run {tmp}", "no durable save is recorded"),
        ("--run {tmp}/nowhere", "no such directory"),
        ("--params 1B --training 1GB", "--training: expected --topology too"),
        ("--topology v5e:2x4", "--topology: expected --run DIRECTORY too"),
        ("--topology v5e:2x4 --run a --params 7B --mtbf 1h", "expected no --params and no --mtbf"),
        ("--topology v5e:2x4 --run {tmp}/nowhere", "no such directory"),
        ("--topology v5e:2x4 --run {saved} --training much", "--training: expected a size such as"),
        ("--topology v5p-128 --run {saved}", "name of a product"),
        ("--topology v5e:2x4 --run {saved}", "libtpu is not installed: "),
    ],
)
def test_wrong_use_is_told(
    args: str, message: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name)
    )
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    filled = args.format(tmp=tmp_path, saved=saved).split()
    assert message in run("plan", *filled, code=exit_codes.USAGE)


@pytest.mark.parametrize(
    ("parsed", "texts"),
    [
        (parsed_size, {"5GB": 5 * 10**9, "1.5 MiB": 3 << 19, "600": 600, "2k": 2000}),
        (parsed_secs, {"90": 90, "1.5 min": 90, "200ms": 0.2, "12h": 43_200, "365d": 31_536_000}),
        (parsed_count, {"70B": 70 * 10**9, "124e6": 124 * 10**6, "1_000": 1000, "1.5k": 1500}),
    ],
)
def test_quantities_are_read(parsed: Callable[[str, str], float], texts: dict[str, float]) -> None:
    assert {text: parsed(text, "--option") for text in texts} == texts


@pytest.mark.parametrize(
    ("parsed", "texts"),
    [
        (parsed_size, ["", "GB", "-1", "0", "0.1", "5XB", "nan"]),
        (parsed_secs, ["", "soon", "-1", "5 weeks", "1e400"]),
        (parsed_count, ["", "many", "_", "1e400"]),
    ],
)
def test_what_is_no_quantity_is_refused(
    parsed: Callable[[str, str], float], texts: list[str]
) -> None:
    for text in texts:
        with pytest.raises(UsageError, match="^plan: --option: expected a "):
            parsed(text, "plan: --option")
