"""Prints how far host memory grows during a save, and how many bytes the save has.

    python host_memory_of_save.py DIRECTORY MAX_HOST_BYTES

MAX_HOST_BYTES 0 sets no bound.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from support.training import P, fsdp_mesh

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer


def status(key: str) -> int:
    found = re.search(key + r":\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


# As on a device, what numpy is given of it is a copy: it lies the other way round in memory.
where = Format(Layout((1, 0)), NamedSharding(fsdp_mesh(4), P("fsdp")))
shapes = [(1024 + 8 * i, 4096) for i in range(12)]
state = {f"w{i}": jax.device_put(np.ones(s, np.float32), where) for i, s in enumerate(shapes)}
jax.block_until_ready(state)
max_bytes = int(sys.argv[2]) or None
options = CheckpointOptions(max_host_bytes=max_bytes, snapshot="reference", compression=False)
with TorchaxCheckpointer(sys.argv[1], options=options) as ckpt:
    ckpt.save(1, state={"w": jax.numpy.ones(4)})
    ckpt.wait_until_finished()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is the present
    before = status("VmRSS")
    ckpt.save(2, state=state, force=True)
    ckpt.wait_until_finished()
    print(status("VmHWM") - before, sum(array.nbytes for array in state.values()))
