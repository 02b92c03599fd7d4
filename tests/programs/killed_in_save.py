"""Several processes train; one is killed while it writes the arrays of a step.

    python killed_in_save.py INDEX COUNT PORT DIRECTORY VICTIM STEP TIMEOUT_SECS

VICTIM is the index of the process that dies at STEP; -1 kills none. A process that is told of the
other's death exits with 3.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from processes_program import INDEX, Training, report

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, errors
from torchax_ckpt.storage.arrays import block_digests

directory = sys.argv[4]
victim, fatal, timeout_secs = map(int, sys.argv[5:8])
training = Training()
options = CheckpointOptions(process_timeout_secs=timeout_secs)
ckpt = TorchaxCheckpointer(directory, options=options)
start = training.attach(ckpt)
report(start=start, whole=training.whole(), own=training.own())
take = block_digests.take


def killed(*args: Any, **kwargs: Any) -> None:
    report(killed=INDEX)
    os.kill(os.getpid(), signal.SIGKILL)


def files() -> list[str]:
    # Process 0 may have given the lease back already.
    return sorted(set(os.listdir(directory)) - {"lease", "events"})


for step in range(start + 1, fatal + 1):
    training.step()
    if step == fatal and victim == INDEX:
        block_digests.take = killed  # type: ignore[assignment]  # while arrays are being written
    if step < fatal:
        ckpt.save(step, force=True)
        ckpt.wait_until_finished()
        report(saved=step, whole=training.whole(), own=training.own())
began = time.monotonic()
ckpt.save(fatal, force=True)
try:
    ckpt.wait_until_finished()
    report(durable=fatal, files=files())
    ckpt.close()
except errors.CheckpointError as error:
    report(
        failed=str(error),
        cause=type(error.__cause__).__name__,
        secs=time.monotonic() - began,
        files=files(),
    )
    os._exit(3)  # JAX would wait for the dead one
