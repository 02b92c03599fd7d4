"""Several processes train; one is stopped in a save, and one is killed in a later save.

    python killed_in_save.py INDEX COUNT PORT DIRECTORY VICTIM STEP TIMEOUT_SECS [STOPPED_STEP]

VICTIM is the index of the process that dies while it writes the arrays of STEP; -1 kills none.
Process 1 stops for 5 s while it writes the arrays of STOPPED_STEP. A process that is told of the
other's death exits with 3.

Environment: with ``VANISH``, the host of VICTIM vanishes: it answers no packet, and closes nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from processes_program import INDEX, Training, report

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, errors
from torchax_ckpt.processes import connections
from torchax_ckpt.storage.arrays import block_digests

STOPPED_SECS = 5
directory = sys.argv[4]
victim, fatal, timeout_secs = map(int, sys.argv[5:8])
stopped_step = int(sys.argv[8]) if len(sys.argv) > 8 else -1
if "VANISH" in os.environ:
    connections.KEEPALIVE.update(TCP_KEEPIDLE=1, TCP_KEEPINTVL=1, TCP_KEEPCNT=2)
training = Training()
options = CheckpointOptions(process_timeout_secs=timeout_secs)
ckpt = TorchaxCheckpointer(directory, options=options)
start = training.attach(ckpt)
report(start=start, whole=training.whole(), own=training.own())
take = block_digests.take


def fall_silent(connection: socket.socket) -> None:
    """Makes this host ignore what arrives at a connection, and send nothing more.

    Without the first, its kernel would answer probes. Without the second, its kernel would send
    probes too, and, because it drops their answers, end the connection with a message of its own.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
    drop = ctypes.create_string_buffer(b"\x06" + bytes(7))  # one instruction: return 0
    program = (ctypes.c_size_t * 2)(1, ctypes.addressof(drop))
    so_attach_filter = 26
    connection.setsockopt(socket.SOL_SOCKET, so_attach_filter, bytes(program))


def killed(*args: Any, **kwargs: Any) -> None:
    if "VANISH" in os.environ:
        for each in connections._open:
            fall_silent(each)
        report(vanished=INDEX)
        os.kill(os.getpid(), signal.SIGSTOP)
    if os.fork() == 0:  # as a worker of a DataLoader that outlives the process
        time.sleep(20)
        os._exit(0)
    report(killed=INDEX)
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(*args: Any, **kwargs: Any) -> Any:
    block_digests.take = take
    subprocess.Popen(["sh", "-c", f"sleep {STOPPED_SECS}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    return take(*args, **kwargs)


def files() -> list[str]:
    # Process 0 may have given the lease back already.
    return sorted(set(os.listdir(directory)) - {"lease", "events"})


for step in range(start + 1, fatal + 1):
    training.step()
    if step == fatal and victim == INDEX:
        block_digests.take = killed  # type: ignore[assignment]  # while arrays are being written
    if step == stopped_step and INDEX == 1:
        block_digests.take = stopped
    if step < fatal:
        began = time.monotonic()
        ckpt.save(step, force=True)
        ckpt.wait_until_finished()
        secs = time.monotonic() - began
        report(saved=step, secs=secs, whole=training.whole(), own=training.own())
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
