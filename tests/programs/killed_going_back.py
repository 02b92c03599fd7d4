"""Goes back to step 2 of four and saves; it is killed before a method of StepDirectory runs.

    python killed_going_back.py DIRECTORY METHOD STEP

STEP is the step that it saves after it went back.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np
import torchax

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.storage.directory.run_directory import RunDirectory

torchax.enable_globally()


def kill(self: Any, *args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ckpt = TorchaxCheckpointer(sys.argv[1], preservation_policy=policies.PreserveAll())
ckpt.attach(stateful={})
for step in (1, 2, 3, 4):
    ckpt.save(step, state={"w": np.full(3, step)}, force=True)
ckpt.wait_until_finished()
ckpt.restore(2)
setattr(RunDirectory, sys.argv[2], kill)
ckpt.save(int(sys.argv[3]), state={"w": np.full(3, 100)}, force=True)
ckpt.wait_until_finished()
