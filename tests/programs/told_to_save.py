"""Saves and reads steps of a run in a bucket as lines of stdin tell it to.

    python told_to_save.py URL NAME NUMBER LEASE_SECS

The lines are ``save STEP`` and ``look``; each outcome is printed as a JSON object. With LEASE_SECS
other than 0 the lease lasts that long, and the program pretends to run on a host called NAME.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import torchax

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.errors import CheckpointError
from torchax_ckpt.storage.directory import lease, lease_holder

signal.alarm(240)
torchax.enable_globally()

logging.basicConfig()
logging.getLogger("torchax_ckpt").setLevel(logging.INFO)
url, name, number, lease_secs = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
if lease_secs:
    # On a host of its own: nobody can look whether this process lives.
    lease_holder.this_kernel = lease.this_kernel = lambda: name
    lease.LEASE_SECS, lease.RENEW_SECS, lease._POLL_SECS = lease_secs, lease_secs / 4, 0.1


def say(**said: Any) -> None:
    print(json.dumps(said), flush=True)


def told(error: Any) -> Any:
    return {"error": type(error).__name__, "text": str(error)}


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.arange(64.0) + 1000 * number + step, "h": np.full(3, step), "by": name}


ckpt = TorchaxCheckpointer(url, preservation_policy=policies.PreserveAll())
say(start=ckpt.attach())
for line in sys.stdin:
    what, *steps = line.split()
    try:
        if what == "look":
            for step in ckpt.all_steps():
                found = ckpt.load(step)
                whole = float(found["w"][0]), found["h"].tolist(), found["by"]
                ckpt.verify(step)
                say(step=step, first=whole[0], h=whole[1], by=whole[2])
            say(end=True)
            continue
        step = int(steps[0])
        say(began=ckpt.save(step, state=state(step), force=True))
        ckpt.wait_until_finished()
        say(durable=step)
    except CheckpointError as error:
        say(**told(error))
try:
    ckpt.close()
    say(closed=True)
except CheckpointError as error:
    say(**told(error))
