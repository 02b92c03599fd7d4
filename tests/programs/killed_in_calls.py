"""Three processes, of which process 1 is killed in a call that the others are in.

    python killed_in_calls.py INDEX COUNT PORT DIRECTORY CALL

CALL is ``restore`` or ``close``. A process that is told of the death exits with 3.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torchax
from jax.sharding import NamedSharding
from processes_program import INDEX, MESH, P, report

from torchax_ckpt import TorchaxCheckpointer, errors
from torchax_ckpt.storage.arrays import block_digests

directory, call = sys.argv[4:6]
torchax.enable_globally()


class Loader:
    """State to save, whose restore is the death of process 1."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": 1}

    def load_state_dict(self, state: Any) -> None:
        if INDEX == 1 and call == "restore":
            os.kill(os.getpid(), signal.SIGKILL)


def killed(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ckpt = TorchaxCheckpointer(directory)
ckpt.attach(stateful={"loader": Loader()})
sharding = NamedSharding(MESH, P("fsdp"))  # each process writes a part
state = {"w": jax.make_array_from_callback((600,), sharding, lambda i: np.arange(600)[i])}
ckpt.save(1, state=state, force=True)
ckpt.wait_until_finished()
if call == "close":
    if INDEX == 1:
        block_digests.take = killed  # type: ignore[assignment]
    ckpt.save(2, state=state, force=True)
began = time.monotonic()
try:
    ckpt.close() if call == "close" else ckpt.restore(1)
except errors.CheckpointError as error:
    report(kind=type(error).__name__, told=str(error), secs=time.monotonic() - began)
    told = Path(f"{directory}-told-2")
    told.touch() if INDEX == 2 else None
    while not told.exists():  # the end of process 0 would end process 2 before it is told
        time.sleep(0.1)
    os._exit(3)  # JAX would wait for the dead one
