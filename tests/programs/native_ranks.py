"""Ranks of plain PyTorch load steps with DCP; each compares all that it has with what was saved.

    python native_ranks.py CASE NUM_RANKS FOLDER

FOLDER has a run for each rank, ``run-RANK`` or ``run`` (else ``$RUN``), and what was saved,
``expected.pt``. Each rank writes ``RANK.json``: the error that it saw, or "". No live group runs
this, because it must go without JAX.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import support.without_jax  # noqa: F401
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from support.native_net import Net, optimizer_of
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torchax_ckpt.torch import LoadPlanner, StorageReader


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def require_equal(found: Any, expected: Any) -> None:
    """Compares each value; of a DTensor, what this rank has of it."""
    flat, _ = flatten_state_dict(found)
    wanted, _ = flatten_state_dict(expected)
    for name, value in flat.items():
        other = wanted[name]
        if not isinstance(value, torch.Tensor):
            assert value == other, (name, value, other)
            continue
        if isinstance(value, DTensor):
            shape, offset = compute_local_shape_and_global_offset(
                value.shape, value.device_mesh, value.placements
            )
            other = other[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
            value = value.to_local()
        if value.dtype != other.dtype:  # narrowed by .to("jax")
            other = other.to(value.dtype)
        assert value.shape == other.shape, (name, value.shape, other.shape)
        assert bits(value) == bits(other), name


def built(kind: str, parallel: str, num_ranks: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net()
    if parallel == "tp":
        mesh = init_device_mesh("cpu", (num_ranks,))
        plans = [(ColwiseParallel(), RowwiseParallel())[i % 2] for i in range(4)]
        parallelize_module(model, mesh, {f"layers.{i}": plan for i, plan in enumerate(plans)})
    elif parallel == "2d":
        mesh = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("dp", "tp"))
        plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    elif parallel == "fsdp":
        mesh = init_device_mesh("cpu", (num_ranks,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, optimizer_of(model, kind)


def load_model(case: str, run: str, expected: Any, num_ranks: int) -> None:
    kind, parallel, *flat = case.split("-")
    model, optimizer = built(kind, parallel, num_ranks)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    options = StateDictOptions(flatten_optimizer_state_dict=bool(flat))
    weights, moments = get_state_dict(model, optimizer, options=options)
    state = {"model": weights, "optimizer": moments, "lr_scheduler": scheduler.state_dict()}
    dcp.load(state, storage_reader=StorageReader(run), planner=LoadPlanner())
    if not flat:
        require_equal(state, expected)
    states: Any = {"model_state_dict": weights, "optim_state_dict": moments}
    set_state_dict(model, optimizer, **states, options=options)
    weights, moments = get_state_dict(model, optimizer)
    require_equal({"model": weights, "optimizer": moments}, expected)


def load_dtypes(run: str, expected: Any, num_ranks: int) -> None:
    """Loads tensors of all dtypes, cut along each dim, and whole."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    for placement in (Shard(0), Shard(1), Replicate()):
        state = {}
        for name, tensor in expected.items():
            shape, _ = compute_local_shape_and_global_offset(tensor.shape, mesh, [placement])
            local = torch.zeros(shape, dtype=tensor.dtype)
            state[name] = DTensor.from_local(
                *(local, mesh, [placement]), shape=tensor.shape, stride=tensor.stride()
            )
        dcp.load({"stateful": {"box": state}}, storage_reader=StorageReader(run))
        require_equal(state, expected)


def rank(index: Any, case: str, num_ranks: Any, folder: Any) -> None:
    warnings.simplefilter("ignore")
    store = f"file://{folder}/store-{case}-{num_ranks}"
    dist.init_process_group("gloo", init_method=store, rank=index, world_size=num_ranks)
    run = Path(folder, f"run-{index}")
    path = os.environ.get("RUN") or str(run if run.exists() else run.with_name("run"))
    expected = torch.load(Path(folder, "expected.pt"), weights_only=True)
    failed = ""
    try:
        if case == "dtypes":
            load_dtypes(path, expected, num_ranks)
        elif case == "weights":
            state = {"model": {n: torch.zeros_like(t) for n, t in expected["model"].items()}}
            planner: Any = LoadPlanner()
            if index == 1 and "DIES" in os.environ:
                if os.environ["DIES"] == "before the load":
                    os._exit(9)
                planner.commit_tensor = lambda *item: os._exit(9)  # after one was filled
            dcp.load(state, storage_reader=StorageReader(path), planner=planner)
            require_equal(state, expected)
        else:
            load_model(case, path, expected, num_ranks)
    except BaseException as error:
        failed = f"{type(error).__name__}: {error}"
    Path(folder, f"{index}.json").write_text(json.dumps(failed))
    dist.destroy_process_group()


if __name__ == "__main__":
    name, number, place = sys.argv[1:]
    mp.start_processes(
        rank, args=(name, int(number), place), nprocs=int(number), start_method="fork"
    )
