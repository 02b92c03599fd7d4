"""Saves, and is killed in the save of step 2 as soon as the journal says that it began.

python killed_once_recorded.py DIRECTORY
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import numpy as np
import torchax

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.storage.writing import array_writer
from torchax_ckpt.telemetry.journal import Journal

torchax.enable_globally()

write, append, written = array_writer.write_arrays, Journal.append, threading.Event()


def append_and_say(self: Any, lines: Any) -> None:
    append(self, lines)
    if any(b'"saving","step":2' in line for line in lines):
        written.set()


Journal.append = append_and_say  # type: ignore[method-assign]


def die(path: Any, *args: Any, **kwargs: Any) -> Any:
    if "writing-2" in path.parent.name:
        assert written.wait(60)
        os.kill(os.getpid(), signal.SIGKILL)
    return write(path, *args, **kwargs)


array_writer.write_arrays = die  # type: ignore[assignment]
ckpt = TorchaxCheckpointer(sys.argv[1])
for step in (1, 2):
    ckpt.save(step, state={"w": np.arange(3)}, force=True)
ckpt.wait_until_finished()
