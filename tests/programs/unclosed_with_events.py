"""Saves, prints its events, and ends without close.

    python unclosed_with_events.py DIRECTORY exit|drop

With ``drop`` the checkpointer is collected before the program ends.
"""

from __future__ import annotations

import gc
import sys

import numpy as np
import torchax

from torchax_ckpt import TorchaxCheckpointer

torchax.enable_globally()
ckpt = TorchaxCheckpointer(sys.argv[1], on_event=lambda event: print(event.name))
ckpt.save(1, state={"w": np.arange(3)})
if "drop" in sys.argv:
    ckpt.wait_until_finished()
    task = ckpt._telemetry._task
    del ckpt
    gc.collect()
    assert task is not None
    assert task.ended.wait(30)
