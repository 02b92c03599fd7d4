"""A step whose commit record is damaged is there, is never taken for sound, and hides no other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath
from support import PROGRAMS, training
from support.commands import run_json
from support.damage import flip_bit, killed_before_setting_aside, set_commit_time
from support.live import Together
from support.steps import save
from support.training import mlp
from typer.testing import CliRunner

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.cli.app import app
from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.storage.directory import commit_record
from torchax_ckpt.storage.directory.committed_step import VERIFIED
from torchax_ckpt.storage.directory.run_directory import RunDirectory

RECORD = "_CHECKPOINT_METADATA"
ALL = policies.PreserveAll()


def state(step: int) -> dict[str, Any]:
    return {"w": np.full((8, 8), step, np.float32)}


def fill(directory: Path, *steps: int, keep: Any = ALL, **options: Any) -> list[int]:
    """Saves the steps, and gives what is there then."""
    with TorchaxCheckpointer(
        directory, preservation_policy=keep, options=CheckpointOptions(**options)
    ) as ckpt:
        for step in steps:
            ckpt.save(step, state=state(step), metrics={"loss": 1.0 / step}, force=True)
            ckpt.wait_until_finished()
        return ckpt.all_steps()


def flip(step: Path, name: str = RECORD) -> None:
    """Flips a bit: of the time in the record, or of the record's digest in the mark."""
    content = (step / name).read_bytes()
    key = {RECORD: b'"commit_timestamp_nsecs": ', commit_record.MARK: b'"_CHECKPOINT_METADATA": "'}[
        name
    ]
    at = content.index(key) + len(key)
    flip_bit(step / name, at)


def test_a_run_does_not_begin_anew_over_its_only_step(directory: Path) -> None:
    training.save(directory, mlp(), step=5)
    flip(directory / "5")
    with TorchaxCheckpointer(directory) as ckpt:
        assert ckpt.latest_step() == 5
        with pytest.raises(CorruptCheckpointError, match=rf"5/{RECORD}: was damaged") as caught:
            ckpt.attach(mlp())
        assert caught.value.step == 5
        for read in (ckpt.load, ckpt.verify):
            with pytest.raises(CorruptCheckpointError, match=RECORD):
                read(5)
    assert (directory / "5" / "manifest").is_dir()


@pytest.mark.parametrize("name", [RECORD, commit_record.MARK])
def test_a_run_goes_on_from_the_step_before_a_damaged_one(directory: Path, name: str) -> None:
    with TorchaxCheckpointer(directory, preservation_policy=ALL) as ckpt:
        ckpt.attach(mlp())
        save(ckpt, 1, 2, 3, of=None)
    flip(directory / "3", name)
    with TorchaxCheckpointer(directory, preservation_policy=ALL) as ckpt:
        with pytest.warns(UserWarning, match=r"skipping .*Other steps in the directory: 1, 2\."):
            assert ckpt.attach(mlp()) == 2
        save(ckpt, 3, of=None)
        assert ckpt.all_steps() == [1, 2, 3]
        assert ckpt.verify(3) == 3
    assert (directory / "abandoned-3").is_dir()
    assert TorchaxCheckpointer(directory).attach(mlp()) == 3


def test_a_step_that_has_lost_its_record_still_says_what_it_abandons(directory: Path) -> None:
    killed_before_setting_aside(directory)
    flip(directory / "11")
    assert [s.step for s in RunDirectory(directory).steps()] == [10, 11]
    with TorchaxCheckpointer(directory) as ckpt, pytest.warns(UserWarning, match=RECORD):
        assert ckpt.attach() == 10  # and not 30


def test_an_abandoned_step_that_has_lost_its_record_is_not_resumed_from(directory: Path) -> None:
    killed_before_setting_aside(directory)
    flip(directory / "30")
    with TorchaxCheckpointer(directory, preservation_policy=ALL) as ckpt:
        with pytest.warns(UserWarning, match=RECORD):
            assert ckpt.attach() == 11
        save(ckpt, 30, of=state(30))
        assert ckpt.all_steps() == [10, 11, 30]
        assert (ckpt.load(30)["w"] == 30).all()


@pytest.mark.parametrize("damaged", [2, 3])
def test_a_damaged_step_takes_no_place_from_a_sound_one(directory: Path, damaged: int) -> None:
    fill(directory, 1, 2, 3)
    flip(directory / str(damaged))
    assert run_json("prune", directory, "--policy", "LatestN(2)")["kept"] == [1, 2, 3]
    kept = [3] if damaged == 2 else [2, 3]
    assert run_json("prune", directory, "--policy", "LatestN(1)")["kept"] == kept
    beside = [] if damaged == 2 else [2, 3]
    assert fill(directory, 4, keep=policies.LatestN(2)) == sorted({*beside, 3, 4})
    assert fill(directory, 5, keep=policies.LatestN(2)) == [4, 5]


def test_a_damaged_step_is_kept_as_the_rules_say_and_can_be_deleted(directory: Path) -> None:
    fill(directory, 1, 2, 3)
    flip(directory / "1")
    best = policies.BestN(metric="loss", mode="max", n=1)
    assert fill(directory, 4, keep=best) == [1, 2, 4]  # 2 is the best that can be read
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.delete(1)
        assert ckpt.all_steps() == [2, 4]


def test_a_verified_step_that_has_lost_its_record_counts_no_more(directory: Path) -> None:
    fill(directory, 1, 2, read_back=True)
    assert (directory / "2" / VERIFIED).exists()
    flip(directory / "2")
    steps = {s["step"]: s for s in run_json("ls", directory)["steps"]}
    assert (steps[1]["verified"], steps[2]["verified"]) == (True, False)
    assert steps[2]["committed"] is None
    assert fill(directory, 3, 4, keep=policies.LatestN(1)) == [1, 4]


@pytest.mark.slow
def test_several_processes_agree(together: Together, directory: Path) -> None:
    def told(phase: str) -> list[Any]:
        program = PROGRAMS / "arrays_on_processes.py"
        return together(program, 2, "damaged_records", directory, phase)

    told("save")
    flip(directory / "2")
    assert told("load") == [[{"same": True, "said": True, "steps": [1, 2]}]] * 2
    flip(directory / "1")
    assert told("load") == [[{"refused": True}]] * 2
    assert told("prune") == [[{"steps": [3, 4]}]] * 2
    assert json.loads((directory / "4" / RECORD).read_text())["commit_timestamp_nsecs"] > 0


def test_a_copy_leaves_out_a_damaged_step(directory: Path, tmp_path: Path) -> None:
    fill(directory, 1, 2, 3)
    flip(directory / "2")
    done = CliRunner().invoke(app, ["copy", str(directory), str(tmp_path / "copy")])
    assert done.exit_code == exit_codes.FOUND
    assert f"2/{RECORD}: was damaged" in done.stderr
    assert TorchaxCheckpointer(tmp_path / "copy").all_steps() == [1, 3]
    done = CliRunner().invoke(app, ["copy", str(directory / "2"), str(tmp_path / "none")])
    assert done.exit_code == exit_codes.FOUND
    assert not (tmp_path / "none").exists()


def test_a_step_in_the_shadow_of_a_later_one_of_its_number_is_nobodys(directory: Path) -> None:
    """As where a program could not see that a step was committed, and saved it once more."""
    with TorchaxCheckpointer(directory, preservation_policy=ALL) as ckpt:
        ckpt.attach(mlp())
        save(ckpt, 10, 20, of=None)
    later = epath.Path(shutil.copytree(directory / "20", directory / "incoming-20"))
    set_commit_time(Path(later), commit_record.read_time(later) + 1)
    with TorchaxCheckpointer(directory, preservation_policy=ALL) as ckpt:
        ckpt.attach(mlp())
        ckpt.restore(10)
        save(ckpt, 15, of=None)
        assert ckpt.all_steps() == [10, 15]
    assert TorchaxCheckpointer(directory).attach(mlp()) == 15
