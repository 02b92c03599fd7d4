"""Saves within an event loop that has signal handlers of its own.

python handlers_of_event_loop.py DIRECTORY
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import torch
from preempted_program import NEVER, say

from torchax_ckpt import TorchaxCheckpointer


async def main() -> None:
    loop = asyncio.get_running_loop()
    seen: list[str] = []
    loop.add_signal_handler(signal.SIGUSR1, seen.append, "earlier")
    theirs = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(theirs)
    model = torch.nn.Linear(4, 4).to("jax")
    with TorchaxCheckpointer(sys.argv[1], save_decision_policy=NEVER) as ckpt:
        ckpt.attach(model)
        ckpt.save(1, force=True)
        ckpt.wait_until_finished()
        assert ckpt.restore().step == 1
        assert "model" in ckpt.load(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0.2)
        assert seen == ["earlier"], seen
    assert signal.set_wakeup_fd(theirs) == theirs
    with TorchaxCheckpointer(sys.argv[1], save_decision_policy=NEVER) as ckpt:
        assert ckpt.attach(model) == 1
        # Takes our wakeup descriptor away, and our handler of SIGTERM with it.
        loop.add_signal_handler(signal.SIGTERM, seen.append, "later")
        ckpt.save(2)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.2)
        assert seen == ["earlier", "later"], seen
        assert ckpt.save(3) and ckpt.reached_preemption(3) and ckpt.all_steps() == [1, 3]
    say("done")


asyncio.run(main())
