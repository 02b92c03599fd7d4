"""One of two processes whose policy records at which steps it was told of a preemption.

python preempted_policy.py PORT INDEX DIRECTORY
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torchax

from torchax_ckpt import TorchaxCheckpointer, policies

port, index, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
place = f"127.0.0.1:{port}"
jax.distributed.initialize(place, 2, index, coordinator_bind_address=place)
torchax.enable_globally()
told: set[int] = set()


class Recording(policies.PreemptionCheckpointingPolicy):
    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: policies.DecisionContext
    ) -> bool:
        if context.reached_preemption:
            told.add(step.step)
        return super().should_save(step, previous_steps, context=context)


ckpt = TorchaxCheckpointer(directory, save_decision_policy=Recording())
print("ready", flush=True)
for step in range(1, 3000):
    should_save = ckpt.should_save(step)
    assert ckpt.save(step, state={"w": np.full(3, step)}) == should_save
    if ckpt.reached_preemption(step):
        break
    time.sleep(0.02)
expected = [step] if index == 0 else []  # process 0 alone asks policies
print("durable", ckpt.all_steps() == [step] and sorted(told) == expected, flush=True)
ckpt.close()
sys.exit(143)
