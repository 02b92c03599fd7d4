"""Two ranks save tensors, sharded and not, as a distributed checkpoint.

    python ranks_saving_dcp.py DCP_FOLDER STORE

STORE is a file that the ranks find each other by.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def rank(index: Any, folder: Any, store: Any) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(35.0).reshape(7, 5)
    dcp.save(
        {
            "model": {
                "rows": distribute_tensor(whole, mesh, [Shard(0)]),
                "columns": distribute_tensor(whole + 100, mesh, [Shard(1)]),
                "same": distribute_tensor(whole + 200, mesh, [Replicate()]),
                "turned": (whole + 300).t(),
                "number": torch.tensor(7.0),
            }
        },
        checkpoint_id=folder,
    )
    dist.destroy_process_group()


mp.start_processes(rank, args=tuple(sys.argv[1:]), nprocs=2, start_method="fork")
