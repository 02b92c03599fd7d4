"""One of two processes of jax.distributed that train until one of them is told to end.

python preempted_processes.py PORT INDEX DIRECTORY
"""

from __future__ import annotations

import signal
import sys
import time

import jax
import torchax

from torchax_ckpt import TorchaxCheckpointer, policies

port, index, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
place = f"127.0.0.1:{port}"
jax.distributed.initialize(place, 2, index, coordinator_bind_address=place)
theirs = signal.getsignal(signal.SIGTERM)
torchax.enable_globally()
ckpt = TorchaxCheckpointer(directory, save_decision_policy=policies.SpecificStepsPolicy(()))
ckpt.attach()
assert signal.getsignal(signal.SIGTERM) is theirs
print("ready", flush=True)
for step in range(1, 3000):
    if ckpt.reached_preemption(step):
        break
    time.sleep(0.02)
assert all(ckpt.reached_preemption(later) for later in (step, step + 1, step + 2))
assert ckpt.reached_preemption() and ckpt.should_save(step)
print("reached", step, flush=True)
ckpt.close()
print("closed", ckpt.reached_preemption(), flush=True)
sys.exit(143)
