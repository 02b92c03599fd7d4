"""Several processes train for seven steps and are killed while they save the seventh.

python killed_after_training.py INDEX COUNT PORT DIRECTORY SEED
"""

from __future__ import annotations

from group_run import ckpt, train, training
from processes_program import die, report

assert training.attach(ckpt) == 0
train(1, 7)
ckpt.wait_until_finished()
report(steps=ckpt.all_steps())
ckpt.save(7, force=True)
die()
