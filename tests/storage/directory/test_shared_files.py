"""Steps that share files: commands count a byte once, and name all steps that are damaged."""

from __future__ import annotations

import os
import subprocess
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from support.commands import run, run_json
from support.damage import flip_bit
from support.steps import save_states

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.cli.output import size
from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.processes import messages
from torchax_ckpt.storage.directory.committed_step import VERIFIED, CommittedStep
from torchax_ckpt.storage.directory.shared_files import Usage, damaged_too

NUM_STEPS = 8
BASE_BYTES = 1 << 20  # of the array that does not change from step 3 on


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 3, 5 and 7 share one copy of an array, steps 4, 6 and 8 the other copy."""
    directory = tmp_path_factory.mktemp("saved") / "run"
    base = jax.device_put(np.random.default_rng(0).random((BASE_BYTES // 4,), np.float32))
    states = {
        step: {"base": base + (step < 3), "x": jax.device_put(np.float32(step))}
        for step in range(1, NUM_STEPS + 1)
    }
    return save_states(directory, states, options=CheckpointOptions(reuse=["state/base"]))


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """A copy that keeps the links."""
    subprocess.run(["cp", "-a", saved, tmp_path / "run"], check=True)
    return tmp_path / "run"


def found(*folders: Path) -> dict[int, int]:
    """The files below some folders, each once, with their sizes."""
    files = [p.stat() for folder in folders for p in folder.rglob("*") if p.is_file()]
    return {status.st_ino: status.st_size for status in files}


def steps_in(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.name.isdecimal()]


def shared_file(directory: Path, step: int) -> Path:
    folder = directory / str(step) / "state" / "ocdbt.process_unchanged0"
    (path,) = folder.glob("d/*")
    assert path.stat().st_nlink > 1
    return path


def test_ls_says_what_of_a_step_is_shared_and_counts_a_byte_once(saved: Path) -> None:
    listed = run_json("ls", saved)
    for entry in listed["steps"]:
        folder = saved / str(entry["step"])
        others = found(*(path for path in steps_in(saved) if path != folder))
        files = found(folder)
        assert entry["size_bytes"] == sum(files.values())
        shared = sum(size for file, size in files.items() if file in others)
        assert entry["shared_bytes"] == shared
        assert (shared > BASE_BYTES) == (entry["step"] > 2)
    total = sum(found(*steps_in(saved)).values())
    assert listed["size_bytes"] == total
    assert sum(s["size_bytes"] for s in listed["steps"]) > total + 4 * BASE_BYTES
    assert "; shared bytes count once" in run("ls", saved)


def test_the_report_counts_a_shared_byte_once(saved: Path, tmp_path: Path) -> None:
    (of_run,) = run_json("report", saved, tmp_path / "page.html")["runs"]
    assert of_run["new_bytes"]["p50"] < 0.9 * of_run["num_bytes"]["p50"]
    page = (tmp_path / "page.html").read_text()
    assert "8 steps; shared bytes count once" in page
    assert f"of {size(int(of_run['num_bytes']['p50']))} in a step" in page
    assert f"now {size(sum(found(*steps_in(saved)).values()))}" in page


@pytest.mark.parametrize("keep", [1, 3])
def test_prune_says_what_a_deletion_frees(directory: Path, keep: int) -> None:
    """If one step is left, one of the two copies is freed; if three are left, none."""
    before = sum(found(*steps_in(directory)).values())
    dry = run_json("prune", directory, "--policy", f"LatestN({keep})")
    shared = size(run_json("ls", directory)["steps"][2]["shared_bytes"])
    said = run("prune", directory, "--policy", f"LatestN({keep})", "--delete")
    freed = before - sum(found(*steps_in(directory)).values())
    assert dry["freed_bytes"] == freed
    assert f"of which {shared} are shared with other steps" in said
    assert f"freeing {size(freed)}; kept" in said


def test_bytes_that_a_file_elsewhere_keeps_are_not_freed(tmp_path: Path) -> None:
    """Such as a backup by links, or the run's own folder of frozen arrays."""
    for step in ("1", "2"):
        (tmp_path / step).mkdir()
    (tmp_path / "1" / "shared").write_bytes(b"12345")
    os.link(tmp_path / "1" / "shared", tmp_path / "2" / "shared")
    (tmp_path / "2" / "kept").write_bytes(b"123")
    (tmp_path / "2" / "own").write_bytes(b"1")
    os.link(tmp_path / "2" / "kept", tmp_path / "backup")
    steps = [CommittedStep(n, epath.Path(tmp_path / str(n)), n) for n in (1, 2)]
    usage = Usage(steps)
    assert [usage.num_bytes(s) for s in steps] == [5, 9]
    assert [usage.shared_bytes(s) for s in steps] == [5, 5]
    assert usage.total_bytes == 9
    assert [usage.freed_bytes(s) for s in ([], steps[:1], steps[1:], steps)] == [0, 0, 1, 6]


def test_verify_names_all_steps_that_share_a_damaged_file(directory: Path) -> None:
    run("verify", directory, "--all")
    flip_bit(shared_file(directory, 7), BASE_BYTES // 2)
    (result,) = run_json("verify", directory / "7", code=exit_codes.FOUND)["steps"]
    assert result["damaged_too"] == [3, 5]
    assert result["error"].endswith("Steps that share the damaged file are damaged too: 3, 5.")
    marked = [step for step in range(1, 9) if (directory / str(step) / VERIFIED).exists()]
    assert marked == [1, 2, 4, 6, 8]


def test_damage_in_a_file_of_one_step_concerns_no_other(directory: Path) -> None:
    folder = directory / "7" / "state" / "ocdbt.process_0" / "d"
    path = max(folder.iterdir(), key=lambda p: p.stat().st_size)
    flip_bit(path, path.stat().st_size // 2)
    (result,) = run_json("verify", directory, 7, code=exit_codes.FOUND)["steps"]
    assert result["damaged_too"] == []
    assert "damaged too" not in result["error"]


def test_the_checkpointer_names_them_and_marks_none_as_verified(directory: Path) -> None:
    run("verify", directory, "--all")
    flip_bit(shared_file(directory, 8), BASE_BYTES // 2)
    with TorchaxCheckpointer(directory) as ckpt:
        with pytest.raises(CorruptCheckpointError) as caught:
            ckpt.verify(8)
        expected = "are damaged too: 4, 6. Other steps in the directory: 1 (verified), 2 (verified)"
        assert expected in str(caught.value)
        assert not any((directory / str(step) / VERIFIED).exists() for step in (4, 6, 8))


def test_a_restore_that_skips_a_step_names_all_that_share_the_file(directory: Path) -> None:
    flip_bit(shared_file(directory, 8), BASE_BYTES // 2)
    with TorchaxCheckpointer(directory) as ckpt, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert float(ckpt.load()["x"]) == 7
    assert "skipping an unreadable checkpoint: step 8" in str(said[0].message)
    assert "damaged too: 4, 6." in str(said[0].message)


def groups(directory: Path) -> dict[str, tuple[str, ...]]:
    """For each file that several steps have, which ones."""
    steps: dict[int, list[str]] = {}
    for path in directory.rglob("*"):
        if path.is_file():
            steps.setdefault(path.stat().st_ino, []).append(str(path.relative_to(directory)))
    return {names[0]: tuple(names) for names in map(sorted, steps.values()) if len(names) > 1}


def test_copies_of_steps_share_what_the_steps_share(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    copied = run_json("copy", saved, target)
    assert groups(target) == groups(saved) != {}
    assert copied["num_bytes"] == sum(found(*steps_in(target)).values())
    assert not found(target).keys() & found(saved).keys()
    one = tmp_path / "one"
    run("copy", saved / "8", one)  # complete by itself
    run("verify", one, 8)
    assert groups(one) == {}


def test_nothing_is_linked_from_a_copy_that_was_left_out(directory: Path, tmp_path: Path) -> None:
    """Step 3 is damaged in a file of its own, which is found after its files were copied."""
    folder = directory / "3" / "state" / "ocdbt.process_0" / "d"
    path = max(folder.iterdir(), key=lambda p: p.stat().st_size)
    flip_bit(path, path.stat().st_size // 2)
    target = tmp_path / "copy"
    run("copy", directory, target, code=exit_codes.FOUND)
    run("verify", target, "--all")
    sharing = {tuple(int(name[0]) for name in names) for names in groups(target).values()}
    assert sharing == {(5, 7), (4, 6, 8)}


def test_the_copy_of_a_damaged_file_is_linked_by_none(directory: Path, tmp_path: Path) -> None:
    flip_bit(shared_file(directory, 7), BASE_BYTES // 2)
    target = tmp_path / "copy"
    run("copy", directory, target, code=exit_codes.FOUND)
    assert sorted(path.name for path in steps_in(target)) == ["1", "2", "4", "6", "8"]
    run("verify", target, "--all")


def test_a_damaged_file_is_told_from_one_whose_name_begins_like_its_name(tmp_path: Path) -> None:
    for step in ("1", "2", "3"):
        (tmp_path / step).mkdir()
    for name, other in (("ab", "2"), ("abc", "3")):
        (tmp_path / "1" / name).write_bytes(b"1")
        os.link(tmp_path / "1" / name, tmp_path / other / name)
    steps = [CommittedStep(n, epath.Path(tmp_path / str(n)), n) for n in (1, 2, 3)]
    file = tmp_path / "1" / "abc"
    error = CorruptCheckpointError(f"the first damaged byte lies in {file}", file=file)
    from_other_process = messages.from_json(messages.to_json(error, 1))
    for each in (error, from_other_process):
        assert damaged_too(each, steps[0], steps) == [steps[2]]
    assert damaged_too(CorruptCheckpointError(str(error)), steps[0], steps) == []
