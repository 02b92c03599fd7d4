"""The table of MaxText's flags: what stands in it does what the flag does."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PROGRAMS, ROOT
from support.live import Together
from support.processes import run_python
from support.stages import Gate

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies

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


# What stands in the row, for this N -> the steps there are after six, by tier.
KEPT: dict[str, tuple[int, dict[Any, list[int]]]] = {
    "enable_checkpointing": (1, {"durable": [4, 5, 6]}),
    "enable_continuous_checkpointing": (1, {"durable": [4, 5, 6]}),
    "max_num_checkpoints_to_keep": (4, {"durable": [3, 4, 5, 6]}),
    "checkpoint_period": (2, {"durable": [2, 4, 6]}),
    "enable_emergency_checkpoint": (1, {"durable": [4, 5, 6], "local": [5, 6]}),
    "local_checkpoint_directory": (1, {"durable": [], "local": [5, 6]}),
    "local_checkpoint_period": (2, {"durable": [], "local": [4, 6]}),
}


def test_every_flag_stands_in_the_table_and_is_tested() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert set(ROWS) <= tested | KEPT.keys()
    assert KEPT.keys() <= set(ROWS)


@pytest.mark.parametrize("flag", KEPT)
def test_what_stands_in_a_row_keeps_the_steps_that_the_flag_keeps(
    flag: str, written: Any, directory: Path
) -> None:
    n, kept = KEPT[flag]
    ckpt = written(flag, n)
    if isinstance(ckpt, LocalTier):
        never = policies.SpecificStepsPolicy(())
        ckpt = TorchaxCheckpointer(directory, save_decision_policy=never, local=ckpt)
    with ckpt:
        for step in range(1, 7):
            ckpt.save(step, state={"w": np.full(3, step)})
            ckpt.wait_until_finished()
    assert {tier: ckpt.all_steps(tier) for tier in kept} == kept


def test_async_checkpointing(directory: Path) -> None:
    wait, save = ROWS["async_checkpointing"]
    gate = Gate("write the arrays")
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(stateful={})
        names = {"ckpt": ckpt, "step": 1}
        assert eval(save, names)
        assert gate.entered.wait(30)
        assert ckpt.all_steps() == []
        gate.opened.set()
        eval(wait, names)
        assert ckpt.all_steps() == [1]


@pytest.mark.slow
def test_enable_single_replica_ckpt_restoring(together: Together, directory: Path) -> None:
    row = ROWS["enable_single_replica_ckpt_restoring"][0]
    program = PROGRAMS / "arrays_on_processes.py"
    first, second = together(program, 2, "bytes_of_restore", directory, row)
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
