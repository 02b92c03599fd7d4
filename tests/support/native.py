"""Runs that torchax saves and ranks of plain PyTorch load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support import PROGRAMS
from support.native_net import Net, optimizer_of, state_of
from support.processes import Started
from support.training import before_enabling
from torchax_ckpt import TorchaxCheckpointer, policies, torchax_backend

NATIVE = ("torch", "torch.distributed.checkpoint.state_dict", "tensorstore", "torchax_ckpt")


def plain(value: Any) -> Any:
    """Returns a state dict with plain CPU tensors in place of torchax's."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    if isinstance(value, torch.Tensor) and torchax_backend.is_device_tensor(value):
        return torchax_backend.from_numpy(np.array(torchax_backend.buffer(value)))
    return value


def save_net(
    folder: Path, kind: str = "adamw", steps: int = 2, run: str | None = None, **settings: Any
) -> None:
    """Trains and saves a Net under torchax; writes what the newest step has to expected.pt."""
    torch.manual_seed(0)
    with before_enabling():
        model = Net()
    model = model.to("jax")
    model.head.weight = model.embed.weight
    optimizer = optimizer_of(model, kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    with TorchaxCheckpointer(
        run or folder / "run", preservation_policy=policies.PreserveAll(), **settings
    ) as ckpt:
        ckpt.attach(model, optimizer, lr_scheduler=scheduler)
        for step in range(1, steps + 1):
            for i, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, 0.5 + i + step)
            optimizer.step()
            scheduler.step()
            ckpt.save(step, force=True)
            ckpt.wait_until_finished()
    state = plain(state_of(model, optimizer, scheduler))
    with torchax_backend.native_torch():
        torch.save(state, folder / "expected.pt")


def run_ranks(case: str, num_ranks: int, folder: Path, **env: str) -> list[str]:
    """Runs the ranks; returns the error that each saw, or ""."""
    arguments = (PROGRAMS / "native_ranks.py", case, str(num_ranks), folder)
    result = Started(*arguments, devices=None, env=env, modules=NATIVE).result(200)
    found = [folder / f"{rank}.json" for rank in range(num_ranks)]
    assert all(p.exists() or env for p in found), result.stderr[-3000:]
    return [json.loads(path.read_text()) if path.exists() else "died" for path in found]


def run_native(source: str, *arguments: str | Path) -> str:
    """Runs source without JAX; returns its output. It has torch, dcp, Net and a few more names."""
    program = Started("-c", _PREAMBLE + source, *arguments, devices=None, modules=NATIVE)
    result = program.result(240)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


_PREAMBLE = """
import json, os, pathlib, random, sys, time, warnings
import torch
import torch.distributed.checkpoint as dcp
import support.without_jax
from native_ranks import bits, require_equal
from support.native_net import Net, optimizer_of, state_of
from torchax_ckpt import errors
from torchax_ckpt.torch import LoadPlanner, StorageReader, restore

warnings.simplefilter("ignore")
folder = pathlib.Path(sys.argv[1])
run = folder / "run"
expected = torch.load(folder / "expected.pt") if (folder / "expected.pt").exists() else None

def built(kind="adamw"):
    torch.manual_seed(1)
    model = Net()
    optimizer = optimizer_of(model, kind)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 7)

def failure(call):
    try:
        call()
    except BaseException as error:
        [error] = [e for e, _ in error.failures.values()] if hasattr(error, "failures") else [error]
        return [type(error).__name__, str(error)]
    raise AssertionError("did not fail")
"""
