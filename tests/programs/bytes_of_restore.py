"""Two processes report how many bytes each reads of a step, without and with options.

    python bytes_of_restore.py INDEX COUNT PORT DIRECTORY OPTIONS

OPTIONS is an expression, as MaxText's table in the documentation has it.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes_program import report

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.storage.arrays import read_arrays

directory, row = sys.argv[4:]
host = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("slice", "fsdp"))
state = {
    "w": jax.make_array_from_callback(
        host.shape, NamedSharding(mesh, P("fsdp")), lambda index: host[index]
    )
}
with TorchaxCheckpointer(directory) as ckpt:
    ckpt.save(1, state=state, force=True)
read: list[int] = []
arrival = read_arrays._Arrival


def counted(committed: Any, target: Any, piece: Any, store: Any, *pace: Any) -> Any:
    read.append(piece.nbytes)
    return arrival(committed, target, piece, store, *pace)


read_arrays._Arrival = counted  # type: ignore[assignment,misc]
for options in (CheckpointOptions(), eval(row)):
    read.clear()
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        found = ckpt.load(1, state)["w"]
    for shard in found.addressable_shards:
        assert np.asarray(shard.data).tobytes() == host[shard.index].tobytes()
    report(read=sum(read))
