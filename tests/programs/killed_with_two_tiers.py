"""Trains a model with tied weights, with two tiers, and is killed after a step.

    python killed_with_two_tiers.py DIRECTORY RAMDISK LAST KILL_AT

KILL_AT 0 kills it never.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from typing import Any

import jax
import numpy as np
import torch
import torchax
from jax.sharding import Mesh
from support.compare import bits, training_state
from support.training import fsdp_rule, train_step

from torchax_ckpt import LocalTier, TorchaxCheckpointer, policies

torchax.enable_globally()

(directory, ramdisk), (total, kill_at) = sys.argv[1:3], map(int, sys.argv[3:])
torch.manual_seed(0)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(8, 8, bias=False)
        self.two = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 4)
        self.two.weight = self.one.weight

    def forward(self, x: Any) -> Any:
        return self.head(torch.tanh(self.two(torch.dropout(self.one(x), 0.0, False))))


torch.__future__.set_swap_module_params_on_conversion(True)
model = Tied().to("jax")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ckpt = TorchaxCheckpointer(
    directory,
    save_decision_policy=policies.FixedIntervalPolicy(4),
    local=LocalTier(ramdisk, save_decision_policy=policies.FixedIntervalPolicy(1)),
)
mesh = Mesh(np.array(jax.devices()), ("fsdp",))
start = ckpt.attach(model, optimizer, shardings=fsdp_rule(mesh))
print("start", start, ckpt.restore().tier if start else None, flush=True)
for step in range(start + 1, total + 1):
    train_step(model, optimizer, step)
    ckpt.save(step)
    if step == kill_at:
        ckpt.wait_until_finished()
        os.kill(os.getpid(), signal.SIGKILL)
ckpt.close()
print(
    "end",
    hashlib.sha256(
        repr(
            [[sorted((k, bits(v)) for k, v in part.items())] for part in training_state(model)]
        ).encode()
    ).hexdigest(),
    flush=True,
)
assert model.two.weight is model.one.weight
