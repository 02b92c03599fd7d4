"""One of two processes of jax.distributed that train until one of them is told to end.

The first step is FIRST, which comes SECS seconds after the program says that it is ready.

python preempted_processes.py PORT INDEX DIRECTORY FIRST SECS
"""

from __future__ import annotations

import signal
import sys
import time

import jax
import torchax

from torchax_ckpt import TorchaxCheckpointer, policies

port, index, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
first, secs = int(sys.argv[4]), float(sys.argv[5])
place = f"127.0.0.1:{port}"
jax.distributed.initialize(place, 2, index, coordinator_bind_address=place)
theirs = signal.getsignal(signal.SIGTERM)
torchax.enable_globally()
ckpt = TorchaxCheckpointer(directory, save_decision_policy=policies.SpecificStepsPolicy(()))
ckpt.attach()
assert signal.getsignal(signal.SIGTERM) is theirs
print("ready", flush=True)
time.sleep(secs)
for step in range(first, first + 3000):
    if ckpt.reached_preemption(step):
        break
    time.sleep(0.02)
assert all(ckpt.reached_preemption(later) for later in (step, step + 1, step + 2))
assert ckpt.reached_preemption() and ckpt.should_save(step)
print("reached", step, flush=True)
ckpt.close()
print("closed", ckpt.reached_preemption(), flush=True)
sys.exit(143)
