"""Continues a run of train_gpt.py in plain PyTorch: FSDP2 on two CPU processes, without JAX.

    python examples/train_gpt.py --directory runs/gpt
    python examples/continue_native.py --directory runs/gpt --out runs/gpt-native
    python examples/continue_native.py --take-back runs/gpt-native

The first command trains under torchax with optax. The second loads weights and moments of its
newest checkpoint, each rank its slices, into a sharded model and torch's AdamW, trains on, and
saves with ``dcp.save``. The third takes these weights back under torchax, and prints their loss.
"""

from __future__ import annotations

import argparse
import os
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_gpt import BATCH, CONTEXT, GPT, VOCABULARY, text
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from torchax_ckpt.torch import LoadPlanner, StorageReader

RANKS = 2


def batch(source: np.ndarray, generator: np.random.Generator, size: int) -> torch.Tensor:
    begin = generator.integers(len(source) - CONTEXT, size=(size, 1))
    return torch.from_numpy(source[begin + np.arange(CONTEXT + 1)]).long()


def loss_of(model: Any, window: torch.Tensor) -> torch.Tensor:
    logits = model(window[:, :-1])
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), window[:, 1:].reshape(-1))


def load(run: str, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Loads what train_gpt.py saved: functional state, with the moments of optax."""
    weights, state = get_state_dict(model, optimizer)
    moments: Any = state["state"]
    steps = torch.zeros((), dtype=torch.int32)
    # A module's tied weights are one tensor in the run, under its first name.
    params = {name: tensor for name, tensor in weights.items() if name != "head.weight"}
    adam = {
        "count": steps,
        "mu": {name: moments[name]["exp_avg"] for name in moments},
        "nu": {name: moments[name]["exp_avg_sq"] for name in moments},
    }
    wanted = {"state": {"params": params, "opt_state": {"0": adam}}}
    dcp.load(wanted, storage_reader=StorageReader(run), planner=LoadPlanner())
    weights["head.weight"] = weights["tokens.weight"]
    for entry in moments.values():
        entry["step"].fill_(int(steps))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    if dist.get_rank() == 0:
        print(f"continues after {int(steps)} steps")


def train(rank: int, args: argparse.Namespace, port: int) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = GPT()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    load(args.directory, model, optimizer)
    source, generator = text(), np.random.default_rng(rank)
    for step in range(1, args.steps + 1):
        loss = loss_of(model, batch(source, generator, BATCH // RANKS))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step in (1, args.steps):
            dist.all_reduce(mean := loss.detach() / RANKS)
            if rank == 0:
                print(f"step {step}: loss {mean:.4f}")
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=args.out)
    dist.destroy_process_group()


def take_back(folder: str) -> None:
    """Takes the weights under torchax; prints their loss on the text."""
    import torchax

    from torchax_ckpt import warm_start

    torchax.enable_globally()
    model = GPT().to("jax").eval()
    model.head.weight = model.tokens.weight  # .to("jax") unties them
    warm_start(model, folder, exclude="head.weight")  # DCP saves each name of a tied tensor
    window = batch(text(), np.random.default_rng(9), 4 * BATCH).to("jax")
    print(f"taken back: loss {loss_of(model, window).item():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default="runs/gpt", help="the run of train_gpt.py")
    parser.add_argument("--out", default="runs/gpt-native", help="the folder for dcp.save")
    parser.add_argument("--steps", type=int, default=60, help="steps to train")
    parser.add_argument("--take-back", metavar="FOLDER", help="only take weights back")
    args = parser.parse_args()
    if args.take_back:
        take_back(args.take_back)
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    torch.multiprocessing.spawn(train, (args, port), nprocs=RANKS)


if __name__ == "__main__":
    main()
