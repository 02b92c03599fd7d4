"""Compiles for long while a save is stuck.

python preempted_while_stuck.py DIRECTORY GRACE_SECS
"""

from __future__ import annotations

import sys
import time

from preempted_program import compile_for_long, state

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.storage.writing import array_writer

options = CheckpointOptions(preemption_grace_secs=float(sys.argv[2]))
ckpt = TorchaxCheckpointer(sys.argv[1], options=options)
ckpt.save(1, state=state(1), force=True)
ckpt.wait_until_finished()
array_writer.write_arrays = lambda *args, **kwargs: time.sleep(600)  # type: ignore[assignment]
ckpt.save(2, state=state(2), force=True)
compile_for_long(2500)
