"""Two processes save an array whose replicas differ from process to process.

python differing_replicas.py INDEX COUNT PORT DIRECTORY
"""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes_program import report

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer

directory = sys.argv[4]
mesh = Mesh(np.array(jax.devices()), ("replica",))
host = np.arange(4096, dtype=np.float32).reshape(64, 64)
pieces = [  # what a cosmic ray, or a collective without an order, leaves of one that was alike
    jax.device_put(host + (device.process_index == 1), device) for device in jax.local_devices()
]
array = jax.make_array_from_single_device_arrays(host.shape, NamedSharding(mesh, P()), pieces)
options = CheckpointOptions(read_back=True, process_timeout_secs=60)
with TorchaxCheckpointer(directory, options=options) as ckpt:
    ckpt.save(1, state={"w": array}, force=True)
    ckpt.wait_until_finished()
    ckpt.verify(1)
    report(steps=ckpt.all_steps())
