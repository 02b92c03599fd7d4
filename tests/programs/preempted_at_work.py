"""Trains in the loop of ``steps()``; step 2 compiles, or transfers, for long.

python preempted_at_work.py DIRECTORY compilation|transfer AMOUNT
"""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

import torch
from preempted_program import PATIENT, compile_for_long, say, transfer_for_long

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.runtime import preemption


def handler(signum: int, frame: Any) -> None:
    say("handled", signum)


signal.signal(signal.SIGTERM, handler)
model = torch.nn.Linear(4, 4).to("jax")
work = {"compilation": compile_for_long, "transfer": transfer_for_long}[sys.argv[2]]
policy = policies.FixedIntervalPolicy(1000)
with TorchaxCheckpointer(sys.argv[1], save_decision_policy=policy, options=PATIENT) as ckpt:
    ckpt.attach(model)
    for step in ckpt.steps(50):
        if step == 2:
            work(int(sys.argv[3]))
            say("worked", time.monotonic())
            say("noticed", preemption._watch.noticed_at)
            assert not ckpt.reached_preemption()
    say("durable", ckpt.all_steps(), ckpt.reached_preemption(), ckpt.reached_preemption(3))
    say("again", ckpt.save(step), ckpt.save(step + 1), ckpt.all_steps())
say("closed", ckpt.reached_preemption())
sys.exit(143)
