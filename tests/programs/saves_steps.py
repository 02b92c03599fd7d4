"""Attaches to a run, goes back to a step if one is named, and saves steps.

    python saves_steps.py DIRECTORY BACK_TO STEP ...

BACK_TO may be empty.
"""

from __future__ import annotations

import sys

import torchax
from support.training import mlp

from torchax_ckpt import TorchaxCheckpointer, policies

torchax.enable_globally()
keep = policies.PreserveAll()
with TorchaxCheckpointer(sys.argv[1], preservation_policy=keep) as ckpt:
    ckpt.attach(mlp())
    if sys.argv[2]:
        ckpt.restore(int(sys.argv[2]))
    for step in map(int, sys.argv[3:]):
        ckpt.save(step, force=True)
