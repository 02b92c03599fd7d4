"""Trains in a loop of its own until a SIGTERM is noticed.

    python preempted_in_loop.py DIRECTORY handler|twice

With ``handler`` it sets a handler of its own later; with ``twice`` it sends itself two signals in
a row.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from preempted_program import NEVER, PATIENT, say, state

from torchax_ckpt import TorchaxCheckpointer


def later(signum: int, frame: Any) -> None:
    say("handled later")


ckpt = TorchaxCheckpointer(sys.argv[1], save_decision_policy=NEVER, options=PATIENT)
for step in range(1, 100_000):
    ckpt.save(step, state=state(step))
    if step == 1:
        if sys.argv[2] == "handler":
            signal.signal(signal.SIGTERM, later)
        say("working")
        if sys.argv[2] == "twice":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGTERM)
    if ckpt.reached_preemption(step):
        break
    time.sleep(0.01)
say("durable", ckpt.all_steps() == [step])
ckpt.close()
sys.exit(143)
