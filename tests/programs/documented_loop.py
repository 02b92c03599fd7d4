"""Runs the loop without a Trainer that docs/lightning.md shows, and is told to end in step 3.

    python documented_loop.py DIRECTORY CODE

CODE is the documented block; ``train_on_a_batch()`` stands in it for its training.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torchax
from support.training import mlp, train_step
from torchdata.stateful_dataloader import StatefulDataLoader

from torchax_ckpt import policies
from torchax_ckpt.integrations.lightning import BareLoop, TorchaxCheckpoint

torchax.enable_globally()
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
loader = StatefulDataLoader(torch.zeros(2))
never = policies.SpecificStepsPolicy([])
checkpoint = TorchaxCheckpoint(sys.argv[1], save_decision_policy=never)
loop = BareLoop(optimizers=[optimizer])  # the documented code makes another
total, loss = 100_000, 0.5


def train_on_a_batch() -> None:
    train_step(model, optimizer, seed=0)
    print(loop.global_step + 1, flush=True)
    if loop.global_step == 2:
        os.kill(os.getpid(), signal.SIGTERM)


exec(sys.argv[2])
print("went on")
