"""Two processes compare the memory that copies take with the memory that was predicted.

python sizes_on_processes.py INDEX COUNT PORT
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from processes_program import MESH, report

from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.snapshot.device_sizes import bytes_on_devices
from torchax_ckpt.snapshot.stacking import bytes_to_execute, execute

rows = NamedSharding(MESH, P("fsdp"))
ones = np.ones((8, 1024), np.float32)
leaves = {
    name: jax.make_array_from_callback(ones.shape, rows, lambda index: ones[index])
    for name in ("layers.0", "layers.1", "other")
}
plan = Plan({"layers.*": ("layers.0", "layers.1")}, frozenset())
predicted = bytes_to_execute(plan, leaves, copy=True)
found = bytes_on_devices(execute(plan, leaves, copy=True).values())
shard_bytes = ones.nbytes // MESH.size
report(
    devices=len(found),
    shards=[num_bytes / shard_bytes for num_bytes in found.values()],
    is_as_predicted=found == predicted,
)
