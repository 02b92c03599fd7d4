"""prune and copy: what goes, what stays, and what never half appears."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import run, run_json
from support.compare import assert_trees_identical, entries
from support.damage import damage
from support.steps import save_states

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.storage.directory.committed_step import VERIFIED
from torchax_ckpt.stored import copy

LOSSES = {1: 0.5, 2: 0.1, 3: 0.9, 4: 0.7, 5: 0.6}


def state(step: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(step).standard_normal((64, 64)), "n": step}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    metrics = {step: {"loss": loss} for step, loss in LOSSES.items()}
    directory = tmp_path_factory.mktemp("saved") / "run"
    return save_states(directory, {step: state(step) for step in LOSSES}, metrics)


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


def steps_in(directory: Path) -> list[int]:
    with TorchaxCheckpointer(directory) as ckpt:
        return ckpt.all_steps()


def test_a_dry_run_only_says_what_would_go(directory: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in directory.rglob("*")}
    result = run_json("prune", directory, "--policy", "LatestN(2)")
    assert result["dry_run"] is True
    assert (result["kept"], result["deleted"]) == ([4, 5], [1, 2, 3])
    files = [p for step in (1, 2, 3) for p in (directory / str(step)).rglob("*") if p.is_file()]
    assert result["freed_bytes"] == sum(p.stat().st_size for p in files)
    assert "would delete 3 of 5 steps" in run("prune", directory, "--policy", "LatestN(2)")
    assert {p: p.stat().st_mtime_ns for p in directory.rglob("*")} == before


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (("--policy", "LatestN(2)"), [4, 5]),
        (("--policy", "EveryNSteps(2)"), [2, 4, 5]),
        (("--policy", "BestN(loss, min)"), [2, 5]),
        (("--policy", "CustomSteps(1, 3)"), [1, 3, 5]),
        (("--policy", "BestN( loss, max,1 )", "--policy", "LatestN(1)"), [3, 5]),
    ],
)
def test_what_no_rule_keeps_is_deleted(
    rules: tuple[Any, ...], kept: list[int], saved: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(saved, tmp_path / "run")
    result = run_json("prune", directory, *rules, "--delete")
    assert result["dry_run"] is False
    assert result["kept"] == kept == steps_in(directory)
    assert result["deleted"] == [step for step in LOSSES if step not in kept]
    # Nothing else is left: no lease, no half-deleted step.
    assert entries(directory) == {str(step) for step in kept}


def test_the_newest_verified_step_is_spared_in_dry_runs_too(directory: Path) -> None:
    run("verify", directory, 2)
    words = ("prune", directory, "--policy", "LatestN(1)")
    for flags in ((), ("--delete",)):
        assert run_json(*words, *flags)["deleted"] == [1, 3, 4]
    assert steps_in(directory) == [2, 5]


def test_a_directory_that_is_being_written_to_is_not_pruned(directory: Path) -> None:
    words = ("prune", directory, "--policy", "LatestN(1)")
    with TorchaxCheckpointer(directory, preservation_policy=policies.PreserveAll()) as ckpt:
        ckpt.save(6, state=state(6), force=True)
        ckpt.wait_until_finished()
        before = sorted(directory.rglob("*"))
        assert "writes to" in run(*words, "--delete", code=exit_codes.UNAVAILABLE)
        assert sorted(directory.rglob("*")) == before
        assert run_json(*words)["kept"] == [6]


def test_what_to_keep_must_be_said(directory: Path) -> None:
    rules = [
        *("LatestN", "LatestN(0)", "LatestN(x)", "LatestN(1, 2)", "AnyPreservationPolicy()"),
        *("BestN()", "BestN(loss, low)", "BestN(loss, min, 0)", "CustomSteps(a)", "eval(1)"),
    ]
    for words in ((), *(("--policy", rule) for rule in rules)):
        run("prune", directory, *words, "--delete", code=exit_codes.USAGE)
        assert steps_in(directory) == list(LOSSES)


def test_a_step_is_copied_and_verified(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er"
    run("verify", saved, 2, "--read-only")
    assert run_json("copy", saved / "2", target)["steps"] == [2]
    assert (target / "2" / VERIFIED).exists()
    assert not (saved / "2" / VERIFIED).exists()
    with TorchaxCheckpointer(target) as ckpt, TorchaxCheckpointer(saved) as original:
        assert ckpt.metrics(2) == {"loss": 0.1}
        assert_trees_identical(ckpt.load(2), original.load(2))
    assert sorted(p.name for p in target.iterdir()) == ["2"]
    assert all(not p.stat().st_mode & stat.S_IWOTH for p in target.rglob("*"))
    assert os.access(target / "2", os.X_OK)


def test_every_step_of_a_directory_is_copied(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    assert run_json("copy", saved, target)["steps"] == list(LOSSES)
    assert steps_in(target) == list(LOSSES)
    # It is a run like any other.
    with TorchaxCheckpointer(target) as ckpt:
        assert ckpt.attach() == 5
        ckpt.save(6, state=state(6), force=True)
    assert run_json("diff", saved / "1", saved / "2", code=exit_codes.FOUND)["leaves"]


def test_a_damaged_step_is_not_copied_and_no_link_is_followed(
    directory: Path, tmp_path: Path
) -> None:
    target = tmp_path / "copy"
    run("copy", tmp_path / "nowhere", target, code=exit_codes.USAGE)
    (tmp_path / "secret").write_text("secret")
    (directory / "4" / "link").symlink_to(tmp_path / "secret")
    run("copy", directory / "4", target, code=exit_codes.FOUND)
    assert not target.exists()
    for step in (2, 3):
        damage(directory / str(step), state(step)["w"].tobytes()[:64])
    for step in LOSSES.keys() - {2, 3}:
        shutil.rmtree(directory / str(step))
    said = run("copy", directory, target, code=exit_codes.FOUND)
    assert f"nothing was copied to {target}" in said
    assert list(target.iterdir()) == []


def test_a_copy_that_is_damaged_on_the_way_never_counts(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_file = copy._copy_file
    needle = state(3)["w"].tobytes()[:64]

    def damaging(source: Any, target: Any, name: str, *others: Any) -> None:
        copy_file(source, target, name, *others)
        content = (target / name).read_bytes()
        if needle in content:
            (target / name).write_bytes(content.replace(needle, needle[::-1]))

    monkeypatch.setattr(copy, "_copy_file", damaging)
    target = tmp_path / "copy"
    run("copy", directory / "3", target, code=exit_codes.FOUND)
    assert list(target.iterdir()) == []
    assert run_json("verify", directory, 3, "--read-only")["steps"][0]["ok"]


def test_a_full_disk_leaves_nothing_behind(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    target = tmp_path / "copy"
    said = run("copy", directory / "3", target, code=exit_codes.UNAVAILABLE)
    assert "No space left on device" in said
    assert list(target.iterdir()) == []


def test_nothing_is_overwritten(directory: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    run("copy", directory / "2", target)
    before = {p: p.stat().st_mtime_ns for p in target.rglob("*")}
    said = run("copy", directory, target, code=exit_codes.UNAVAILABLE)
    assert "has step 2 already; nothing was copied" in said
    assert {p: p.stat().st_mtime_ns for p in target.rglob("*")} == before
