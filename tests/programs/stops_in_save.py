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
from torchax_ckpt.storage.writing import write_step

torchax.enable_globally()

write = write_step.write_step


def slow(path: Any, *args: Any, before_commit: Any, **kwargs: Any) -> None:
    def stay(folder: Any) -> None:
        print("writing", flush=True)
        sys.stdin.readline()
        before_commit(folder)

    write(path, *args, before_commit=stay, **kwargs)


ckpt = TorchaxCheckpointer(sys.argv[1])
ckpt.save(1, state={"w": np.arange(3)})
ckpt.wait_until_finished()
write_step.write_step = slow  # type: ignore[assignment]
ckpt.save(2, state={"w": np.arange(3)}, force=True)
ckpt.wait_until_finished()
