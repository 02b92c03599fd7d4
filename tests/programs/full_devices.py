"""Two processes save; the devices of one have no memory left at some steps.

    python full_devices.py INDEX COUNT PORT DIRECTORY MODE HOST_BYTES FULLS

MODE is that of snapshots. HOST_BYTES are available on the host. FULLS is JSON: for each step the
process whose devices are full, or null.
"""

from __future__ import annotations

import json
import sys
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from processes_program import INDEX, MESH, report

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, errors, policies
from torchax_ckpt.snapshot.device_memory import DeviceMemory
from torchax_ckpt.snapshot.snapshotter import Snapshotter

directory, mode, host_bytes = sys.argv[4], cast(Any, sys.argv[5]), int(sys.argv[6])
fulls = json.loads(sys.argv[7])
rows = NamedSharding(MESH, P("fsdp"))
ones = np.ones((8, 1024), np.float32)
limit = {"bytes_in_use": 0}
ckpt = TorchaxCheckpointer(
    directory,
    options=CheckpointOptions(process_timeout_secs=60),
    preservation_policy=policies.PreserveAll(),
)
memory = DeviceMemory(lambda device: limit, lambda: host_bytes)
ckpt._saves.snapshotter = Snapshotter(mode, "auto", memory)
failed = {}


def filled(value: int) -> jax.Array:
    return jax.make_array_from_callback(ones.shape, rows, lambda index: ones[index] * value)


for step, full in enumerate(fulls, 1):
    state = {f"layers.{i}.w": filled(step * i) for i in range(5)}
    limit["bytes_limit"] = 0 if full == INDEX else 1 << 40
    ckpt.save(step, state=state, force=True)
    try:
        ckpt.wait_until_finished()
    except errors.SaveError as error:
        failed[step] = str(error)
    jax.tree.map(lambda x: x.delete(), state)  # as a step that donates
ckpt.close()
abstract = {name: jax.ShapeDtypeStruct(ones.shape, ones.dtype, sharding=rows) for name in state}
steps = ckpt.all_steps()
report(
    failed=failed,
    steps=steps,
    means=[
        [float(np.asarray(s.data).mean()) for s in a.addressable_shards]
        for step in steps
        for a in ckpt.load(step, abstract).values()
    ],
)
