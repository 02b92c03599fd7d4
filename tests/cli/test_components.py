"""What show and diff say of what is not a tensor: a line for each object, none for each number."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.commands import run, run_json
from support.models import Box
from support.steps import save_states
from support.training import adamw, mlp, train_step

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.cli import exit_codes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, between which everything changes."""
    directory = tmp_path_factory.mktemp("saved") / "run"
    model, average = mlp(), Box()
    optimizer = adamw(model)
    schedulers = {"decay": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model, optimizer, lr_scheduler=schedulers, stateful={"average": average})
        for step in (1, 2):
            train_step(model, optimizer, step)
            schedulers["decay"].step()
            average.state = {"n": step, "order": [i + step for i in range(100)], "worst": -np.inf}
            random.seed(step)
            np.random.seed(step)
            torch.manual_seed(step)
            ckpt.save(step, force=True)
            ckpt.wait_until_finished()
    return directory


def line(text: str, name: str) -> str:
    [found] = [row for row in text.splitlines() if row.split()[:1] == [name]]
    return " ".join(found.split())


def test_show_has_a_line_for_each_component_with_its_plain_values(saved: Path) -> None:
    text = run("show", saved)
    assert "decay/last_epoch=2" in line(text, "lr_scheduler")
    assert "class='AdamW'" in line(text, "optimizer")
    assert "param_groups/0/lr=0." in line(text, "optimizer")
    values = "average/n=2 average/order=[2, 3, 4, 5, 6, 7, ...] average/worst=-inf"
    assert line(text, "stateful") == f"stateful {values} group=True"
    random.seed(2)
    first = random.getstate()[1][0]
    assert f"python=[3, [{first}, " in line(text, "rng")
    assert line(text, "model") == "model"  # it has arrays only
    assert len(text.splitlines()) < 30


def test_a_filter_of_show_selects_values_too_and_json_has_them_all(saved: Path) -> None:
    text = run("show", saved, "--filter", "*/last_epoch")
    assert line(text, "lr_scheduler") == "lr_scheduler decay/last_epoch=2"
    values = run_json("show", saved)["values"]
    assert values["lr_scheduler/decay/last_epoch"] == 2
    assert values["stateful/average/worst"] == "-Infinity"
    assert values["stateful/average/order"] == list(range(2, 102))
    random.seed(2)
    assert tuple(values["rng/python"][1]) == random.getstate()[1]


def test_diff_has_a_line_for_each_generator_and_each_list(saved: Path) -> None:
    words = ("diff", saved / "1", saved / "2")
    text = run(*words, code=exit_codes.FOUND)
    for generator in ("rng/python", "rng/torch"):
        assert len([row for row in text.splitlines() if row.startswith(generator)]) == 1
    assert line(text, "stateful/average/order").startswith(
        "stateful/average/order content [1, 2, 3, "
    )
    assert line(text, "stateful/average/n") == "stateful/average/n content 1 -> 2"
    assert len(text.splitlines()) < 40
    assert all(len(row) < 600 for row in text.splitlines())
    [counts] = [row for row in text.splitlines() if row.startswith("differences: 4 in model, ")]
    assert "2 in stateful" in counts
    values = {d["name"]: d for d in run_json(*words, code=exit_codes.FOUND)["values"]}
    assert values["stateful/average/order"]["b"] == str([*range(2, 102)])


def test_diff_tells_equal_values_with_other_bits_apart(tmp_path: Path) -> None:
    for name, zero in (("a", 0.0), ("b", -0.0)):
        save_states(tmp_path / name, {1: {"zero": zero, "nan": float("nan")}})
    words = ("diff", tmp_path / "a", tmp_path / "b")
    assert (
        line(run(*words, code=exit_codes.FOUND), "state/zero") == "state/zero content 0.0 -> -0.0"
    )
    assert "state/nan" not in run(*words, code=exit_codes.FOUND)


@pytest.mark.parametrize("command", ["show", "diff"])
@pytest.mark.parametrize("pattern", ["modle/*", "optimizer/*/exp_avgs", "*.wieght"])
def test_a_filter_that_matches_nothing_is_an_error(pattern: str, command: str, saved: Path) -> None:
    steps = (saved,) if command == "show" else (saved / "1", saved / "2")
    said = run(command, *steps, "--filter", pattern, code=exit_codes.USAGE)
    assert f"found {pattern!r}, which matches none of " in said


def test_a_folder_of_runs_names_them(tmp_path: Path) -> None:
    for name, step in (("b", 3), ("2026", 7)):
        with TorchaxCheckpointer(tmp_path / name) as ckpt:
            ckpt.attach(mlp())
            ckpt.save(step, force=True)
    (tmp_path / "plots").mkdir()
    (tmp_path / "notes.txt").write_text("a user's")
    named = "the runs in this folder: 2026 (newest step 7), b (newest step 3)"
    assert named in run("ls", tmp_path)
    assert run_json("ls", tmp_path)["runs"] == {"2026": 7, "b": 3}
    assert run_json("ls", tmp_path / "b")["runs"] == {}
    for command in ("show", "verify", "export"):
        words = (command, tmp_path, *([tmp_path / "w.safetensors"] if command == "export" else []))
        assert "there are no checkpoints" in run(*words, code=exit_codes.USAGE)


def test_one_is_singular(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        with TorchaxCheckpointer(tmp_path / name) as ckpt:
            ckpt.attach(rng=False)
            ckpt.save(1, state={"w": np.full(1, value), "s": name * 2}, force=True)
    texts = [
        run("show", tmp_path / "a"),
        run("diff", tmp_path / "a", tmp_path / "a"),
        run("diff", tmp_path / "a", tmp_path / "b", code=exit_codes.FOUND),
        run("export", tmp_path / "a", tmp_path / "w.safetensors", "--at", "state"),
        run("report", tmp_path / "a", tmp_path / "page.html"),
        run("prune", tmp_path / "a", "--policy", "LatestN(1)"),
    ]
    plural = r"\b1 (leaves|elements|values|tensors|steps|programs|saves|names)\b"
    assert [text for text in texts if re.search(plural, text)] == []
