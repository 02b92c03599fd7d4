"""Two hosts with shards of their own, one of which meets faults.

python host_shards_with_faults.py INDEX COUNT PORT DIRECTORY RAMDISKS SEED
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from typing import Any

from host_shards_opened import mine, opened, training
from processes_program import INDEX, report
from support.damage import flip_arrays

from torchax_ckpt import errors, policies
from torchax_ckpt.storage.directory.run_directory import RunDirectory

ckpt = opened(policies.SpecificStepsPolicy((4,)), keep=9)
training.attach(ckpt)


def train(*steps: Any) -> None:
    for step in steps:
        training.step()
        assert ckpt.save(step)
    ckpt.wait_until_finished()


train(1, 2)
for step in (1, 2):
    assert ckpt.verify(step, tier="local") == step
marks = {step: mine / str(step) / "verified" for step in (1, 2)}
assert all(mark.exists() for mark in marks.values())

# The copy of one host is damaged.
if INDEX == 1:
    flip_arrays(mine / "1")
told = []
for call in (ckpt.restore, ckpt.load):
    try:
        call(1, tier="local")
    except errors.CheckpointError as error:
        told.append(type(error).__name__)
train(3, 4)
report(told=told, marked=[step for step in marks if marks[step].exists()])

# One host has lost a step.
if INDEX == 1:
    shutil.rmtree(mine / "4")
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    found = ckpt.restore()
report(step=found.step, tier=found.tier, skipped=found.skipped_steps, said=len(said))

# One host's disk fails when the others have committed.
commit = RunDirectory.commit


def failing(self: Any, step: Any, written: Any) -> Any:
    if str(self.path) == str(mine):
        time.sleep(1)
        raise OSError(5, "Input/output error")
    return commit(self, step, written)


if INDEX == 1:
    RunDirectory.commit = failing  # type: ignore[method-assign]
training.step()
assert ckpt.save(5)
try:
    ckpt.wait_until_finished()
except errors.SaveError as error:
    failure = str(error)
RunDirectory.commit = commit  # type: ignore[method-assign]
report(failed="Input/output error" in failure, there=sorted(os.listdir(mine)))
train(6)
ckpt.close()
report(local=ckpt.all_steps("local"), there=[n for n in os.listdir(mine) if n[0].isdigit()])
