"""Several processes save two steps and report the events that each was told of.

python events_of_processes.py INDEX COUNT PORT DIRECTORY
"""

from __future__ import annotations

import sys

from processes_program import Training, report

from torchax_ckpt import TorchaxCheckpointer

told: list[str] = []
with TorchaxCheckpointer(sys.argv[4], on_event=lambda e: told.append(e.name)) as ckpt:
    training = Training(0)
    training.attach(ckpt)
    for step in (1, 2):
        training.step()
        ckpt.save(step, force=True)
report(told=told, durable=ckpt.stats().num_durable)
