"""A process of a live group, which runs one program after another: see ``support/live.py``.

    python member.py INDEX COUNT PORT ADDRESS

Each program runs as if it were started: as ``__main__``, with the same first arguments. It closes
its checkpointers. It may ``patch`` names, interrupt stages and enable torchax, which is undone. All
else that it leaves behind is a failure.
"""

from __future__ import annotations

import faulthandler
import gc
import inspect
import json
import linecache
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torchax
from jax._src import distributed
from processes_program import INDEX, patches
from support import PROGRAMS
from support.live import DONE, MAX_MESSAGE_BYTES

from torchax_ckpt.runtime import stages

# How long the threads of a program may take to end.
ENDING_SECS = 10.0
# Threads that stay until the process ends, by the beginnings of their names.
STAYING = ("liveness",)


def main() -> None:
    test = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    test.connect(f"\0{sys.argv[4]}")
    first = sys.argv[1:4]
    while task := test.recv(MAX_MESSAGE_BYTES):
        source, name, arguments, deadline_secs = json.loads(task)
        sys.argv = [name, *first, *arguments]
        faulthandler.dump_traceback_later(deadline_secs, exit=True)
        answer = run(source, name)
        faulthandler.cancel_dump_traceback_later()
        test.send(answer.encode()[-MAX_MESSAGE_BYTES // 2 :])


def run(source: str, name: str) -> str:
    """Runs a program; returns what went wrong, or what is left of it, or ``DONE``."""
    before = traces()
    modules = set(sys.modules)
    threads = set(threading.enumerate())
    try:
        with warnings.catch_warnings():
            # So that a traceback shows lines of a program that no file has.
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
            code = compile(source, name, "exec", dont_inherit=True)
            exec(code, {"__name__": "__main__", "__file__": name})
    except BaseException:
        return f"process {INDEX}: {traceback.format_exc()}"
    patches.close()
    stages.observers.clear()
    while torch._C._len_torch_function_stack() > before["modes of torch"]:
        torchax.disable_globally()
    for module in set(sys.modules) - modules:
        if PROGRAMS in Path(getattr(sys.modules[module], "__file__", None) or "").parents:
            del sys.modules[module]  # it has what this program was told
    gc.collect()
    after = traces()
    left = [name for name in before if name not in after or after[name] != before[name]]
    left += [f"thread {thread.name}" for thread in remaining(threads)]
    return f"process {INDEX}: the program leaves behind: {', '.join(left)}" if left else DONE


def remaining(before: set[threading.Thread]) -> list[threading.Thread]:
    """The new threads that do not end."""
    deadline = time.monotonic() + ENDING_SECS
    while True:
        new = set(threading.enumerate()) - before
        left = [thread for thread in new if not thread.name.startswith(STAYING)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


def traces() -> dict[str, Any]:
    """What programs may change for later ones, by descriptions."""
    found: dict[str, Any] = {
        "JAX's connection": distributed.global_state.client,
        "modes of torch": torch._C._len_torch_function_stack(),
        "working directory": os.getcwd(),
        "environment": dict(os.environ),
        "wakeup descriptor": (descriptor := signal.set_wakeup_fd(-1)),
    }
    signal.set_wakeup_fd(descriptor)
    for number in signal.valid_signals():
        found[f"handler of signal {number}"] = signal.getsignal(number)
    for module in [os, time, *(m for name, m in list(sys.modules.items()) if is_watched(name))]:
        for name, value in list(vars(module).items()):
            place = f"{module.__name__}.{name}"
            if callable(value):
                found[place] = value
            if inspect.isclass(value) and value.__module__ == module.__name__:
                found |= {f"{place}.{n}": v for n, v in vars(value).items() if callable(v)}
    return found


def is_watched(module: str) -> bool:
    return module.partition(".")[0] == "torchax_ckpt"


if __name__ == "__main__":
    main()
    os._exit(0)  # JAX would wait for the other processes
