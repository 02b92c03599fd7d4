"""The table of MaxText's flags: what stands in it does what the flag does."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PROGRAMS, ROOT
from support.processes import run_processes, run_python

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.storage.writing import array_writer

PAGE = ROOT / "docs" / "maxtext.md"
ROWS = {
    match[1]: match[2].split("`")[1::2]
    for match in re.finditer(r"^\| `(\w+)=[^`]*` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
}


@pytest.fixture
def written(directory: Path, tmp_path: Path) -> Callable[[str, int], Any]:
    """The first piece of code in a row, evaluated for these paths and this N."""

    def evaluate(flag: str, n: int = 2) -> Any:
        names = {
            "DIRECTORY": directory,
            "RAMDISK": tmp_path / "ramdisk",
            "N": n,
            "policies": policies,
            "LocalTier": LocalTier,
            "CheckpointOptions": CheckpointOptions,
            "TorchaxCheckpointer": TorchaxCheckpointer,
        }
        return eval(ROWS[flag][0], names)

    return evaluate


def run(ckpt: TorchaxCheckpointer, steps: int = 6) -> None:
    with ckpt:
        for step in range(1, steps + 1):
            ckpt.save(step, state={"w": np.full(3, step)})
            ckpt.wait_until_finished()


def test_every_flag_stands_in_the_table_and_is_tested() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_enable_")}
    tested |= {"async_checkpointing", "max_num_checkpoints_to_keep", "checkpoint_period"}
    tested |= {"local_checkpoint_directory", "local_checkpoint_period"}
    assert set(ROWS) == tested
    assert all(f"test_{flag}" in globals() for flag in ROWS)


def test_enable_checkpointing(written: Any) -> None:
    run(ckpt := written("enable_checkpointing"))
    assert ckpt.latest_step() == 6


def test_async_checkpointing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, save = ROWS["async_checkpointing"]
    is_writing, may_write = threading.Event(), threading.Event()
    write = array_writer.write_arrays

    def held_open(*args: Any, **kwargs: Any) -> Any:
        is_writing.set()
        assert may_write.wait(30), "whoever called save waited for the write"
        return write(*args, **kwargs)

    monkeypatch.setattr(array_writer, "write_arrays", held_open)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(stateful={})
        names = {"ckpt": ckpt, "step": 1}
        assert eval(save, names)
        assert is_writing.wait(30)
        assert ckpt.all_steps() == []
        may_write.set()
        eval(wait, names)
        assert ckpt.all_steps() == [1]


def test_enable_continuous_checkpointing(written: Any) -> None:
    run(ckpt := written("enable_continuous_checkpointing"))
    assert ckpt.all_steps() == [4, 5, 6]


def test_max_num_checkpoints_to_keep(written: Any) -> None:
    run(ckpt := written("max_num_checkpoints_to_keep", 4))
    assert ckpt.all_steps() == [3, 4, 5, 6]


def test_checkpoint_period(written: Any) -> None:
    run(ckpt := written("checkpoint_period", 2))
    assert ckpt.all_steps() == [2, 4, 6]


def test_enable_emergency_checkpoint(written: Any) -> None:
    run(ckpt := written("enable_emergency_checkpoint"))
    assert (ckpt.latest_step("local"), ckpt.latest_step("durable")) == (6, 6)


def test_local_checkpoint_directory(written: Any, directory: Path, tmp_path: Path) -> None:
    run(TorchaxCheckpointer(directory, local=written("local_checkpoint_directory")))
    assert (tmp_path / "ramdisk" / "6").is_dir()


def test_local_checkpoint_period(written: Any, directory: Path) -> None:
    never = policies.SpecificStepsPolicy(())
    local = written("local_checkpoint_period", 2)
    run(ckpt := TorchaxCheckpointer(directory, save_decision_policy=never, local=local))
    assert (ckpt.all_steps("local"), ckpt.all_steps("durable")) == ([4, 6], [])


@pytest.mark.slow
def test_enable_single_replica_ckpt_restoring(directory: Path) -> None:
    row = ROWS["enable_single_replica_ckpt_restoring"][0]
    program = PROGRAMS / "arrays_on_processes.py"
    first, second = run_processes(program, 2, "bytes_of_restore", directory, row)
    nbytes = 256 * 256 * 4
    assert first[:2] == [{"read": nbytes}, {"read": nbytes}]
    assert second[:2] == [{"read": nbytes}, {"read": 0}]  # each slice for itself; then one for both


@pytest.mark.slow
def test_enable_autocheckpoint(written: Any, directory: Path) -> None:
    assert written("enable_autocheckpoint") == CheckpointOptions()
    arguments = "in_loop", str(directory), "itself"
    result = run_python(PROGRAMS / "sigterm.py", *arguments, devices=1, check=False)
    assert result.returncode == 128 + signal.SIGTERM, result.stderr[-2000:]
    assert os.path.isdir(directory / "1")
