"""Several processes train under a policy whose interval wrong clocks would part them over.

    python saves_by_clock.py INDEX COUNT PORT DIRECTORY SEED INTERVAL_SECS LAST

Environment: ``SKEW_SECS``, see ``processes_program.py``, which is imported before anything else so
that all that is imported finds the clock wrong.
"""

from __future__ import annotations

import sys
import time

from processes_program import Training, report

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies

directory, seed, secs, last = sys.argv[4], *map(int, sys.argv[5:8])
training = Training(seed)
ckpt = TorchaxCheckpointer(
    directory,
    options=CheckpointOptions(process_timeout_secs=60),
    save_decision_policy=policies.ContinuousCheckpointingPolicy(minimum_interval_secs=secs),
    preservation_policy=policies.PreserveAll(),
)
start = training.attach(ckpt)
restored = training.whole(), training.own()
saved = []
for step in range(start + 1, last + 1):
    training.step()
    if ckpt.save(step):
        saved.append(step)
        ckpt.wait_until_finished()
        kept = training.whole(), training.own()
ckpt.close()
ahead = time.time() - time.clock_gettime(time.CLOCK_REALTIME)
report(start=start, restored=restored, saved=saved, kept=kept, ahead=ahead)
