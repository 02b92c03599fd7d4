"""Several processes train for eight steps without an interruption.

python straight_run.py INDEX COUNT PORT DIRECTORY SEED
"""

from __future__ import annotations

from group_run import ckpt, train, training
from processes_program import listening, report

assert training.attach(ckpt) == 0
train(1, 8)
report(listening=listening())
ckpt.close()
assert ckpt.all_steps() == [4, 8]
