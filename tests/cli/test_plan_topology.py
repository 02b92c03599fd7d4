"""``torchax-ckpt plan --topology``, on CPU devices that stand for the chips of a topology."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.commands import run, run_json
from typer.testing import CliRunner

from torchax_ckpt import TorchaxCheckpointer, planning
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.cli.app import app
from torchax_ckpt.planning import topology


@pytest.fixture
def eight_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(name: str, num_slices: int = 1, *, one_chip_per_host: bool = False) -> Any:
        return tuple(jax.devices("cpu"))

    monkeypatch.setattr(topology, "devices", devices)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose newest step has arrays on devices and on the host."""
    path = tmp_path_factory.mktemp("run") / "a"
    with TorchaxCheckpointer(path) as ckpt:
        for step in (10, 20):
            state = {
                "weights": jax.numpy.ones((64, 16 * step // 10), jax.numpy.bfloat16),
                "on_host": np.ones((1024, 1024)),
                "count": step,
            }
            ckpt.save(step, state=state, force=True)
    return path


@pytest.mark.usefixtures("eight_chips")
def test_the_newest_step_of_a_run_is_planned(directory: Path) -> None:
    said = run_json("plan", "--topology", "v5e:2x4", "--run", directory, "--training", "1GiB")
    assert said.pop("step") == 20
    leaves = {
        "state/weights": jax.ShapeDtypeStruct((64, 32), jax.numpy.bfloat16),
        "random/jax": jax.ShapeDtypeStruct((2,), jax.numpy.uint32),  # the library's own
    }
    plan = dataclasses.asdict(planning.on_topology(leaves, "v5e:2x4", training_bytes=1 << 30))
    del plan["compile_secs"]
    assert said.pop("compile_secs") > 0
    assert said == plan
    assert said["state_bytes"] == 64 * 32 * 2 + 8


@pytest.mark.usefixtures("eight_chips")
def test_the_step_and_the_mesh_can_be_chosen(directory: Path) -> None:
    asked = ("plan", "--topology", "v5e:2x4", "--run", directory / "10", "--tp", 2)
    said = run_json(*asked, "--fsdp", 4)
    assert said == {**run_json(*asked), "compile_secs": said["compile_secs"]}
    assert said["step"] == 10
    assert said["axes"] == {"fsdp": 4, "tp": 2}
    said = run_json("plan", "--topology", "v5e:2x2", "--run", directory, "--slices", 2)
    assert said["axes"] == {"slice": 2, "fsdp": 4}


@pytest.mark.usefixtures("eight_chips")
def test_a_table_for_people(directory: Path) -> None:
    lines = run("plan", "--topology", "v5e:2x4", "--run", directory).splitlines()
    said = {row[0]: row[1:] for row in (re.split(r" {2,}", line.strip()) for line in lines)}
    assert said["v5e:2x4"] == ["source"]
    assert said["chips"] == ["8, 8 on each host; fsdp=8", "given"]
    assert said["state of step 20"] == ["4.1 kB in 2 leaves", "stored"]
    assert said["HBM of a chip"] == ["17.2 GB", "published"]
    assert said["state on a chip"] == ["520 B", "compiled"]
    assert said["training needs on a chip besides"] == ["0 B", "given"]
    assert said["copies of a save on a chip"] == ["520 B, made if 650 B are free", "compiled"]
    assert said['snapshot="auto" takes'] == ["a snapshot by copy", "computed"]
    assert said["programs of a save"][0].startswith("2, compiled in ")
    assert said["fetching takes"] == ["< 1 ms", "estimated"]
    assert {row[-1] for row in said.values()} == {
        *("source", "given", "stored", "published", "compiled", "computed", "estimated")
    }


@pytest.mark.usefixtures("eight_chips")
def test_the_memory_of_the_host_decides_what_a_full_chip_does(directory: Path) -> None:
    full = (16_125 << 20) - 520  # nothing is free beside the state
    asked = ("plan", "--topology", "v5e:2x4", "--run", directory, "--training", full)
    said = run_json(*asked, "--host-memory", "1MB")
    assert (said["snapshot"], said["part_bytes"]) == ("offload", 0)
    assert said["offload_host_bytes"] == 2 * (64 * 32 * 2) + 8 * 8 + 8  # the key on eight chips
    assert said["host_memory_bytes"] == 1_000_000
    lines = run(*asked, "--host-memory", "1MB").splitlines()
    rows = [re.split(r" {2,}", line.strip()) for line in lines]
    assert ["available on a host", "1 MB", "given"] in rows
    assert ['snapshot="auto" takes', "a snapshot by offload", "computed"] in rows
    assert ["its copies on a chip", "0 B", "compiled"] in rows
    assert ["its memory of a host", "at most 8.26 kB", "compiled"] in rows
    said = run_json(*asked, "--host-memory", "10kB")
    assert (said["snapshot"], said["offload_host_bytes"]) == ("transfer", 0)
    assert "its memory of a host" not in run(*asked, "--host-memory", "10kB")


@pytest.mark.usefixtures("eight_chips")
def test_a_state_that_does_not_fit_is_found(directory: Path) -> None:
    asked = ("plan", "--topology", "v5e:2x4", "--run", directory, "--training", "20GiB")
    said = run_json(*asked, code=exit_codes.FOUND)
    assert said["fits"] is False
    assert said["snapshot"] is None
    text = run(*asked, code=exit_codes.FOUND)
    assert "snapshot" not in text
    assert "training needs on a chip besides" in text


@pytest.mark.usefixtures("eight_chips")
def test_the_message_says_how_much_is_missing_and_what_would_do(directory: Path) -> None:
    asked = ["plan", "--topology", "v5e:2x4", "--run", str(directory), "--training", "20GiB"]
    said = CliRunner().invoke(app, asked).stderr
    missing = (20 << 30) + 520 - (16_125 << 20)
    assert f"does not fit on v5e:2x4: it and the training need {missing} bytes more" in said
    assert "take as many chips of a generation with more memory (v4, v5p, v6e)" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topology", "v5e:2x4"], r"--topology: expected --run DIRECTORY too, found none; give"),
        (["--run", "a"], r"--run, --fsdp, --tp, --training and --host-memory: expected --topology"),
        (["--tp", "2"], r"--tp, --training and --host-memory: expected --topology too"),
        (["--host-memory", "2GB"], r"and --host-memory: expected --topology too"),
        (
            ["--topology", "v5e:2x4", "--run", "a", "--params", "7B", "--mtbf", "1h"],
            r"--topology: expected no --params and no --mtbf, found both",
        ),
        (
            ["--topology", "v5e:2x4", "--run", "a", "--optimizer", "adamw", "--chips", "4"],
            r"--topology: expected no --optimizer and no --chips, found both",
        ),
        (["--topology", "v5e:2x4", "--run", "/nowhere"], r"/nowhere: no such directory"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], message: str) -> None:
    assert re.search(message, run("plan", *options, code=exit_codes.USAGE))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topology", "v5p-128"], r"v5p-128 is the name of a product .* give v5p:4x4x4"),
        (["--topology", "v5e:2x4", "--tp", "3"], r"a tp that divides the 8 chips of a slice"),
        (["--topology", "v5e:2x4", "--training", "much"], r"--training: expected a size such as"),
        (["--topology", "v5e:2x4", "--host-memory", "x"], r"--host-memory: expected a size such"),
        (["--topology", "v5e:2x4"], r"libtpu is not installed: .* pip install 'torchax-ckpt\[tpu"),
    ],
)
def test_what_cannot_be_planned_is_wrong_usage(
    directory: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "libtpu" else find_spec(name)
    )
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    said = run("plan", *options, "--run", directory, code=exit_codes.USAGE)
    assert re.search(message, said)
