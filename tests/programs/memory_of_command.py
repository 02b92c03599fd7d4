"""Runs a command of torchax-ckpt and prints how far its own memory has grown at most.

python memory_of_command.py MAX_BYTES ARGUMENT ...
"""

from __future__ import annotations

import pathlib
import re
import sys
import threading

# What a command imports takes memory of its own; it is there before the command begins.
import safetensors  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401

import torchax_ckpt.cli.app
import torchax_ckpt.cli.convert
import torchax_ckpt.formats.state_dict  # noqa: F401
from torchax_ckpt.cli.main import main
from torchax_ckpt.storage.arrays import read_arrays


def held() -> int:  # memory of this process's own; what is mapped from files is not
    found = re.search(r"RssAnon:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


read_arrays.STREAMED_BYTES = int(sys.argv.pop(1))
peak, is_over = 0, threading.Event()


def watch() -> None:
    global peak
    while not is_over.wait(0.002):
        peak = max(peak, held())


before = held()
watching = threading.Thread(target=watch)
watching.start()
try:
    main()
except SystemExit as end:
    assert end.code == 0, end.code
finally:
    is_over.set()
    watching.join()
print("grown:", peak - before)
