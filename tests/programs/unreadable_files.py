"""Reads a run as a user who may not read one of its files after the other.

    python unreadable_files.py FOLDER

Saves the run to FOLDER/run first. Prints "all is well" at its end.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import media
import numpy as np
import torch
import torch._dynamo
import torchax
from support.damage import halve

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.errors import CorruptCheckpointError, DirectoryError

torchax.enable_globally()

model = torch.nn.Linear(2, 2).to("jax")  # imports what a lesser user may not be able to read
media.become_nobody()
warnings.simplefilter("error")
os.umask(0)
run = Path(sys.argv[1]) / "run"
with TorchaxCheckpointer(run) as ckpt:
    for step in (1, 2):
        ckpt.save(step, state={"w": np.full(70_000, step)}, force=True)
for path in [run, *run.rglob("*")]:
    assert not path.stat().st_mode & 0o002, f"{path} is writable for everybody"

files = [p for p in (run / "2").rglob("*") if p.is_file()]
used = set()
for path in files:
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        loaded = TorchaxCheckpointer(run).load()  # of the newest step, never of the one before
        np.testing.assert_array_equal(loaded["w"], np.full(70_000, 2))
    except DirectoryError as error:
        assert "Permission denied" in str(error) and "check owner and mode" in str(error), error
        used.add(path.relative_to(run / "2").parts[0])
    path.chmod(mode)
parts = {"_CHECKPOINT_METADATA", "commit_success.txt", "manifest", "state", "summary"}
assert used == parts, used

run.chmod(0)
try:
    TorchaxCheckpointer(run).attach(model)
except DirectoryError as error:
    assert "check owner and mode" in str(error), error
else:
    raise AssertionError("began anew beside a directory that cannot be read")
run.chmod(0o755)

data = max((run / "2").rglob("*"), key=lambda p: p.stat().st_size)
halve(data)
try:
    TorchaxCheckpointer(run).load(2)
except CorruptCheckpointError as error:
    assert "OUT_OF_RANGE" in str(error), error
warnings.simplefilter("ignore")
np.testing.assert_array_equal(TorchaxCheckpointer(run).load()["w"], np.full(70_000, 1))
print("all is well")
