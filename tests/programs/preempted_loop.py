"""Trains until the SIGTERM that it sends itself is noticed.

python preempted_loop.py DIRECTORY
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
import torchax

from torchax_ckpt import TorchaxCheckpointer, policies

torchax.enable_globally()
never = policies.SpecificStepsPolicy(())
with TorchaxCheckpointer(sys.argv[1], save_decision_policy=never) as ckpt:
    ckpt.attach(stateful={})
    os.kill(os.getpid(), signal.SIGTERM)
    for step in range(1, 100):
        ckpt.save(step, state={"w": np.full(3, step)})
        if ckpt.reached_preemption(step):
            break
sys.exit(128 + signal.SIGTERM)
