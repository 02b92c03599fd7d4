"""Two hosts train until one of them is told to end by SIGTERM.

python host_shards_terminated.py INDEX COUNT PORT DIRECTORY RAMDISKS SEED
"""

from __future__ import annotations

import sys

from host_shards_opened import opened, training
from processes_program import report

from torchax_ckpt import policies

ckpt = opened(policies.SpecificStepsPolicy(()))
training.attach(ckpt)
report(ready=True)
for step in range(1, 3000):
    training.step()
    ckpt.save(step)
    if ckpt.reached_preemption(step):
        break
ckpt.close()
report(step=step, durable=ckpt.all_steps("durable"), local=ckpt.all_steps("local"))
sys.exit(143)
