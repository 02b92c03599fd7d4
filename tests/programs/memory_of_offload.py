"""Saves again and again by offload; prints resident memory after 5 saves and after all, in bytes.

    python memory_of_offload.py DIRECTORY SAVES MEGABYTES

Prints also the bytes of the state.
"""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from support.training import P, fsdp_mesh

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies

directory, saves, megabytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def resident_bytes() -> int:
    gc.collect()
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


rows = NamedSharding(fsdp_mesh(4), P("fsdp"))
rng = np.random.default_rng(0)
state = {
    f"layers.{i}.w": jax.device_put(rng.standard_normal((1000, 1000), np.float32), rows)
    for i in range(megabytes // 4)
}
step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
options = CheckpointOptions(snapshot="offload", compression=False)
with TorchaxCheckpointer(
    directory, options=options, preservation_policy=policies.LatestN(1)
) as ckpt:
    for number in range(1, saves + 1):
        state = step(state)
        ckpt.save(number, state=state, force=True)
        ckpt.wait_until_finished()
        if number == 5:
            print(resident_bytes())
    print(resident_bytes(), sum(array.nbytes for array in state.values()))
