"""The table of MaxText's flags: the code in every row runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from support import ROOT

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies

PAGE = ROOT / "docs" / "maxtext.md"
ROWS = re.findall(r"^\| `(\w+)=[^`]*` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)


def test_the_code_in_every_row_runs(tmp_path: Path) -> None:
    assert len(ROWS) == 10
    for flag, row in ROWS:
        directory = tmp_path / flag
        names = {
            "DIRECTORY": directory,
            "RAMDISK": tmp_path / f"{flag}-ramdisk",
            "N": 2,
            "policies": policies,
            "LocalTier": LocalTier,
            "CheckpointOptions": CheckpointOptions,
            "TorchaxCheckpointer": TorchaxCheckpointer,
        }
        if flag == "async_checkpointing":  # calls of a checkpointer that has attached
            with TorchaxCheckpointer(directory) as ckpt:
                ckpt.attach(stateful={})
                wait, save = row.split("`")[1::2]
                assert eval(save, {"ckpt": ckpt, "step": 1})
                eval(wait, {"ckpt": ckpt})
                assert ckpt.all_steps() == [1]
            continue
        made: Any = eval(row.split("`")[1], names)
        if isinstance(made, LocalTier):
            made = TorchaxCheckpointer(directory, local=made)
        elif isinstance(made, CheckpointOptions):
            made = TorchaxCheckpointer(directory, options=made)
        with made as ckpt:
            ckpt.save(2, state={"w": np.zeros(3)})
            ckpt.wait_until_finished()
            for tier in ("durable", "local") if "LocalTier" in row else ("durable",):
                assert ckpt.all_steps(tier) == [2], flag
