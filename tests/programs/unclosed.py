"""Begins a save that takes a while, and ends without close.

    python unclosed.py DIRECTORY STEP SECS end|raise|exit

The save of STEP takes SECS longer. ``exit`` exits with 3.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import torchax

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.storage.writing import array_writer

torchax.enable_globally()
write = array_writer.write_arrays


def slow(*args: Any, **kwargs: Any) -> Any:
    time.sleep(float(sys.argv[3]))
    return write(*args, **kwargs)


array_writer.write_arrays = slow
ckpt = TorchaxCheckpointer(sys.argv[1])
ckpt.save(int(sys.argv[2]), state={"w": np.arange(3)})
if sys.argv[4] == "raise":
    raise ZeroDivisionError
if sys.argv[4] == "exit":
    sys.exit(3)
