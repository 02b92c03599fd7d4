"""Saves step 1, and stops in the save of step 2 until it gets a line on stdin.

    python stops_in_save.py DIRECTORY

Prints "writing" when it stops.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torchax

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.storage.writing import step_writer

torchax.enable_globally()

complete = step_writer.complete


def slow(*args: Any, **kwargs: Any) -> None:
    complete(*args, **kwargs)
    print("writing", flush=True)
    sys.stdin.readline()


ckpt = TorchaxCheckpointer(sys.argv[1])
ckpt.save(1, state={"w": np.arange(3)})
ckpt.wait_until_finished()
step_writer.complete = slow
ckpt.save(2, state={"w": np.arange(3)}, force=True)
ckpt.wait_until_finished()
