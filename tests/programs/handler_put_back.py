"""Puts the handler of a closed checkpointer back, opens another, and sends itself a SIGTERM.

python handler_put_back.py DIRECTORY
"""

from __future__ import annotations

import os
import signal
import sys
import time

from preempted_program import PATIENT, say

from torchax_ckpt import TorchaxCheckpointer

ckpt = TorchaxCheckpointer(sys.argv[1], options=PATIENT)
ckpt.attach()
kept = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda signum, frame: None)
ckpt.close()
signal.signal(signal.SIGTERM, kept)
with TorchaxCheckpointer(sys.argv[1], options=PATIENT) as ckpt:
    ckpt.attach()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0)  # the handler runs
    say("noticed", ckpt.reached_preemption(1))
sys.exit(143)
