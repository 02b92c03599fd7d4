"""Trains until a SIGTERM is noticed, of which jax.distributed takes the notice over meanwhile.

python jax_takes_sigterm.py DIRECTORY PORT
"""

from __future__ import annotations

import sys
import time

from jax._src import distributed
from preempted_program import NEVER, say, state

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.runtime import preemption

place = f"127.0.0.1:{sys.argv[2]}"
ckpt = TorchaxCheckpointer(sys.argv[1], save_decision_policy=NEVER)
ckpt.attach()
ckpt.save(1, state=state(1))
# What jax.distributed.initialize does, without the check that no backend was started.
distributed.global_state.initialize(place, 1, 0, coordinator_bind_address=place)
say("working")
for step in range(2, 3000):
    ckpt.save(step, state=state(step))
    if ckpt.reached_preemption(step):
        break
    time.sleep(0.02)
say("ended at", step, "preempted:", ckpt.reached_preemption(), "durable:", ckpt.all_steps())
say("durable", ckpt.all_steps() == [step], preemption._watch.noticed_at)
assert ckpt.reached_preemption(step + 1)
ckpt.close()
sys.exit(143)
