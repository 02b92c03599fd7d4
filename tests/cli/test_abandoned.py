"""Abandoned steps: they are seen, counted, and deleted by nothing but ``prune --abandoned``."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from support.commands import run, run_json
from support.compare import folders
from support.damage import killed_before_setting_aside, set_commit_time
from support.steps import save

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.storage.directory.run_directory import RunDirectory

ALL = policies.PreserveAll()
FREE = CheckpointOptions(reuse=False)


def opened(directory: Path) -> TorchaxCheckpointer:
    return TorchaxCheckpointer(directory, preservation_policy=ALL, options=FREE)


def went_back(ckpt: TorchaxCheckpointer) -> None:
    """Saves steps 1 to 3, goes back to step 1 twice, and saves step 2 each time."""
    save(ckpt, 1, 2, 3)
    for _ in range(2):
        ckpt.restore(1, strict=False)
        save(ckpt, 2)


@pytest.fixture
def left(directory: Path) -> Path:
    with opened(directory) as ckpt:
        ckpt.attach()
        went_back(ckpt)
    assert folders(directory) == {"1", "2", "abandoned-2", "abandoned-2-2", "abandoned-3"}
    return directory


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_abandoned_steps_are_seen_with_their_bytes(left: Path) -> None:
    aside = ("abandoned-2", "abandoned-2-2", "abandoned-3")
    assert run_json("ls", left)["abandoned"] == {name: size(left / name) for name in aside}
    assert [step["step"] for step in run_json("ls", left)["steps"]] == [1, 2]
    said = run("ls", left)
    assert "3 abandoned steps, " in said
    assert all(name in said for name in aside)
    shutil.rmtree(left / "abandoned-2")
    shutil.rmtree(left / "abandoned-2-2")
    assert "1 abandoned step, " in run("ls", left)


def test_statistics_count_them_and_the_log_says_what_they_hold(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torchax_ckpt")
    with opened(directory) as ckpt:
        ckpt.attach()
        went_back(ckpt)
    aside = [directory / name for name in ("abandoned-2", "abandoned-2-2", "abandoned-3")]
    stats = ckpt.stats()
    assert (stats.num_abandoned, stats.abandoned_bytes) == (3, sum(map(size, aside)))
    told = [r.getMessage() for r in caplog.records if "were set aside" in r.getMessage()]
    assert [text.partition("; ")[2].partition(" there")[0] for text in told] == [
        "2 abandoned steps",
        "3 abandoned steps",
    ]
    with opened(directory) as ckpt:  # the next program counts what it finds
        ckpt.attach()
        save(ckpt, 3)
    assert ckpt.stats().num_abandoned == 3


def test_prune_deletes_them_and_nothing_else(left: Path) -> None:
    others = ("abandoned-2-old-plots", "abandoned-7", "abandoned-x", "deleting-2-plots")
    for name in others:
        (left / name).mkdir()
        (left / name / "plot.png").write_bytes(b"a user's")
    (left / "abandoned-8").symlink_to(left / "1")
    before = folders(left)
    result = run_json("prune", left, "--abandoned")
    assert (result["dry_run"], result["deleted"], result["kept"]) == (True, [], [1, 2])
    assert len(result["abandoned"]) == 3
    assert folders(left) == before
    run("prune", left, "--older-than", "1h", "--policy", "LatestN(1)", code=exit_codes.USAGE)
    none = run_json("prune", left, "--abandoned", "--older-than", "1h", "--delete")["abandoned"]
    assert none == {}
    set_commit_time(left / "abandoned-3", 10**18)
    said = run("prune", left, "--abandoned", "--older-than", "1h", "--delete")
    assert "deleted step 3 of an abandoned branch, abandoned-3, " in said
    assert folders(left) == before - {"abandoned-3"}
    result = run_json("prune", left, "--abandoned", "--delete")
    assert result["freed_bytes"] == sum(result["abandoned"].values()) > 0
    assert folders(left) == {"1", "2", *others, "abandoned-8"}
    assert run_json("prune", left, "--abandoned", "--delete")["abandoned"] == {}


def test_prune_deletes_nothing_beside_a_live_run(left: Path) -> None:
    with opened(left) as ckpt:
        ckpt.attach()
        save(ckpt, 3)
        before = folders(left)
        said = run("prune", left, "--abandoned", "--delete", code=exit_codes.UNAVAILABLE)
        assert "writes to" in said
        assert folders(left) == before


def test_a_step_that_stays_under_its_number_goes_if_the_newest_step_lists_it(
    directory: Path,
) -> None:
    killed_before_setting_aside(directory)
    assert [*run_json("ls", directory)["abandoned"]] == ["20", "30"]
    assert run_json("prune", directory, "--abandoned", "--delete")["kept"] == [10, 11]
    assert folders(directory) == {"10", "11"}
    with opened(directory) as ckpt:
        assert ckpt.attach() == 11


def test_a_local_tier_has_none(directory: Path, tmp_path: Path) -> None:
    local = LocalTier(ramdisk := tmp_path / "ramdisk", keep=9)
    with TorchaxCheckpointer(directory, preservation_policy=ALL, local=local) as ckpt:
        ckpt.attach()
        for step in (1, 2, 3):
            save(ckpt, step, force=False)
        ckpt.restore(1, strict=False)
        save(ckpt, 2, force=False)
    assert folders(ramdisk) == {"1", "2"}
    assert RunDirectory(ramdisk, read_only=True).abandoned() == []
    assert ckpt.stats().num_abandoned == 2
