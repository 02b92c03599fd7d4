"""Two processes save; one is killed after both have a step, while the other asks how that went.

    python killed_once_all_have_step.py INDEX COUNT PORT DIRECTORY RAMDISKS local|durable STEP

Process 0 dies for the local tier, process 1 for the durable one; STEP 0 kills none. Environment:
``DIES_AFTER_SECS`` is the time between the commit of STEP and that.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time
from typing import Any

from processes_program import INDEX, Training, report

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, errors, policies
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored.stored_step import StoredStep

directory, ramdisks, tier = sys.argv[4:7]
fatal = int(sys.argv[7])
places = [pathlib.Path(ramdisks, str(index)) for index in range(2)]
training = Training()
ckpt = TorchaxCheckpointer(
    directory,
    save_decision_policy=policies.FixedIntervalPolicy(1 if tier == "durable" else 99),
    local=LocalTier(places[INDEX], save_decision_policy=policies.FixedIntervalPolicy(1))
    if tier == "local"
    else None,
    options=CheckpointOptions(process_timeout_secs=60, read_back=tier == "durable"),
)
start = training.attach(ckpt)
report(start=start, whole=training.whole(), own=training.own())
there = (
    [place / str(fatal) for place in places]
    if tier == "local"
    else [pathlib.Path(directory, str(fatal))]
)


def die() -> None:
    while not all(path.exists() for path in there):
        time.sleep(0.01)
    time.sleep(float(os.environ["DIES_AFTER_SECS"]))  # the other asks for this one meanwhile
    os.kill(os.getpid(), signal.SIGKILL)


commit, verify = RunDirectory.commit, StoredStep.verify


def fatal_commit(self: Any, step: Any, *args: Any) -> Any:
    durable = commit(self, step, *args)
    if step == fatal and durable.path in there:
        die()
    return durable


def fatal_verify(self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.committed.step == fatal:
        die()
    return verify(self, *args, **kwargs)


if INDEX == 0 and tier == "local":
    RunDirectory.commit = fatal_commit  # type: ignore[method-assign,assignment]
if INDEX == 1 and tier == "durable":
    StoredStep.verify = fatal_verify  # type: ignore[method-assign]
for step in range(start + 1, fatal + 1):
    training.step()
    if step == fatal:
        report(saving=step, whole=training.whole(), own=training.own())
    ckpt.save(step)
    try:
        ckpt.wait_until_finished()
    except errors.SaveError:
        os._exit(3)  # JAX would wait for the dead one
ckpt.close()
