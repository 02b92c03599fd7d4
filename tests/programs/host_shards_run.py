"""Two hosts train for seven steps, each with a local tier for its own shards.

    python host_shards_run.py INDEX COUNT PORT DIRECTORY RAMDISKS SEED KILL_AT

Both are killed when step KILL_AT is saved; 0 kills none.
"""

from __future__ import annotations

import sys
import warnings

from host_shards_opened import opened, training
from processes_program import die, report

from torchax_ckpt import policies

kill_at = int(sys.argv[7])
ckpt = opened(policies.FixedIntervalPolicy(4))
with warnings.catch_warnings(record=True) as said:
    start = training.attach(ckpt)
tier = ckpt.restore(start).tier if start else None
for step in range(start + 1, 8):
    training.step()
    ckpt.save(step)
    if step == kill_at:
        ckpt.wait_until_finished()
        report(start=start, local=ckpt.all_steps("local"))
        die()
ckpt.close()
report(start=start, tier=tier, skipped=len(said), own=training.own(), whole=training.whole())
