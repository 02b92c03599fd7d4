"""A program that a Ctrl-C interrupts while it waits for the library.

Arguments: a directory, and where it waits: wait, close, with, again, exit or twice.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.storage.writing import array_writer

directory, where = Path(sys.argv[1]), sys.argv[2]
writing, go_on = threading.Event(), threading.Event()
write = array_writer.write_arrays


def slowly(*args: Any, **kwargs: Any) -> Any:
    writing.set()
    go_on.wait(60)
    return write(*args, **kwargs)


array_writer.write_arrays = slowly


def report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def interrupt() -> None:
    """Sends a Ctrl-C to this process once the main thread waits for the save."""
    writing.wait(60)
    while not _waits(sys._current_frames()[threading.main_thread().ident or 0]):
        time.sleep(0.005)
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


def _waits(frame: Any) -> bool:
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return bool(names & {"wait", "join", "_wait_for_tstate_lock"})


def interrupted(call: Any) -> None:
    """Calls what a Ctrl-C interrupts, and reports what the library says of the save afterwards."""
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        call()
    except KeyboardInterrupt:
        report(interrupted=True, is_saving=ckpt._saver.is_saving, lease=lease())


def lease() -> bool:
    return (directory / "lease").exists()


ckpt = TorchaxCheckpointer(directory)
ckpt.save(1, state={"w": np.arange(3)})
if where == "wait":
    interrupted(ckpt.wait_until_finished)
    threading.Timer(0.1, go_on.set).start()
    ckpt.wait_until_finished()
    report(steps=ckpt.all_steps())
    ckpt.save(2, state={"w": np.arange(3)})
    ckpt.close()
    report(steps=ckpt.all_steps(), lease=lease())
elif where in ("close", "with"):

    def leave() -> None:
        with ckpt:
            pass

    interrupted(ckpt.close if where == "close" else leave)
    threading.Timer(0.1, go_on.set).start()
    ckpt.close()
    report(steps=ckpt.all_steps(), lease=lease())
elif where == "again":  # the cell of a notebook that is run again
    interrupted(ckpt.close)
    threading.Timer(0.1, go_on.set).start()
    ckpt = TorchaxCheckpointer(directory)
    ckpt.save(2, state={"w": np.arange(3)})
    ckpt.close()
    report(steps=ckpt.all_steps(), lease=lease())
elif where in ("exit", "twice"):
    is_logged = threading.Event()

    class Logged(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "at the program's end" in record.msg:
                is_logged.set()

    def at_exit() -> None:
        interrupt()
        is_logged.wait(60)  # before the save may end
        if where == "twice":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        go_on.set()

    logging.getLogger("torchax_ckpt").addHandler(Logged())
    threading.Thread(target=at_exit, daemon=True).start()
