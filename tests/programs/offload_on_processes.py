"""Two processes save a state to two tiers, and compare what they load with it.

python offload_on_processes.py INDEX COUNT PORT DIRECTORY SNAPSHOT LAYOUT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes_program import INDEX, report

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer

directory, mode, layout = Path(sys.argv[4]), cast(Any, sys.argv[5]), cast(Any, sys.argv[6])
devices = np.array(jax.devices()).reshape(2, -1)  # a row of each process
mesh = Mesh(devices, ("replica", "fsdp"))


def on(spec: P, *shape: int, dtype: Any = np.float32, kind: str = "device") -> jax.Array:
    count = int(np.prod(shape))
    host = np.arange(count * np.dtype(dtype).itemsize).astype(np.uint8).view(dtype).reshape(shape)
    sharding = NamedSharding(mesh, spec, memory_kind=kind)
    return jax.make_array_from_callback(shape, sharding, lambda i: host[i].copy())


state: dict[str, Any] = {
    **{f"layers.{i}.w": on(P("fsdp"), 8, 6 + 2 * (i > 2)) for i in range(5)},
    **{f"norms.{i}": on(P(), 10) for i in range(3)},
    "both": on(P(("fsdp", "replica"), None), 16, 3),
    "columns": on(P(None, "fsdp"), 3, 12, dtype="bfloat16"),
    "whole": on(P(), 7, 5),
    "large": on(P("replica"), 512, 1200),
    "scalar": on(P(), 1).reshape(()),
    "pinned": on(P(), 8, 3, kind="pinned_host"),
    "here": jax.device_put(np.arange(6.0, dtype=np.float32), jax.local_devices()[-1]),
    "host": np.arange(5),
}


def shards(array: Any) -> list[bytes]:
    if not isinstance(array, jax.Array):
        return [array.tobytes()]
    return [np.asarray(shard.data).tobytes() for shard in array.addressable_shards]


with TorchaxCheckpointer(
    directory / "durable",
    options=CheckpointOptions(snapshot=mode, layout=layout, process_timeout_secs=60),
    local=LocalTier(directory / f"local-{INDEX}"),
) as ckpt:
    ckpt.save(1, state=state)
    ckpt.wait_until_finished()
    loaded = {tier: ckpt.load(1, state, tier=cast(Any, tier)) for tier in ("durable", "local")}
    ckpt.verify(1)
    different = [
        f"{tier}/{name}"
        for tier, leaves in loaded.items()
        for name, array in state.items()
        if shards(leaves[name]) != shards(array)
    ]
report(different=different)
