"""Trains while a timer's signal handler saves and waits at any moment.

python saves_in_signal_handler.py DIRECTORY
"""

from __future__ import annotations

import collections
import signal
import sys
import time
from typing import Any

import torch
import torchax

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.errors import CallError

torchax.enable_globally()

model = torch.nn.Linear(8, 8).to("jax")
outcomes: collections.Counter[str] = collections.Counter()
with TorchaxCheckpointer(sys.argv[1], save_decision_policy=policies.FixedIntervalPolicy(1)) as ckpt:
    ckpt.attach(model)

    def handler(signum: int, frame: Any) -> None:
        try:
            ckpt.save(ckpt._loop.position or 0, force=True)
            ckpt.wait_until_finished()
            outcomes["worked"] += 1
        except CallError:
            outcomes["refused"] += 1

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0037)
    deadline = time.monotonic() + 2.5
    for step in ckpt.steps(100_000):  # noqa: B007 - the last one is looked at below
        time.sleep(0.003)
        if time.monotonic() > deadline:
            break
    signal.setitimer(signal.ITIMER_REAL, 0)
    ckpt.wait_until_finished()
    assert ckpt.all_steps()[-1] == step - 1
assert outcomes["refused"] > 5 and outcomes["worked"] > 0, outcomes
