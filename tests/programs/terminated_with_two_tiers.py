"""Saves to a local tier alone until it is told to end by SIGTERM, which it sends itself.

python terminated_with_two_tiers.py DIRECTORY RAMDISK
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
import torchax

from torchax_ckpt import LocalTier, TorchaxCheckpointer, policies

torchax.enable_globally()
never = policies.SpecificStepsPolicy(())
with TorchaxCheckpointer(
    sys.argv[1],
    save_decision_policy=never,
    local=LocalTier(sys.argv[2], save_decision_policy=policies.FixedIntervalPolicy(1)),
) as ckpt:
    ckpt.attach(stateful={})
    for step in range(1, 100):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        ckpt.save(step, state={"w": np.full(3, step)})
        if ckpt.reached_preemption(step):
            break
    print(step, ckpt.all_steps("durable"), ckpt.all_steps("local"))
