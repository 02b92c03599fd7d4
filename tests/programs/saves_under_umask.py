"""Saves to a directory while a thread looks for what everybody could write there.

    python saves_under_umask.py UMASK DIRECTORY

UMASK is octal.
"""

from __future__ import annotations

import os
import pathlib
import sys
import threading
from typing import Any

import torchax
from support.training import mlp

from torchax_ckpt import TorchaxCheckpointer, policies

umask, target = int(sys.argv[1], 8), pathlib.Path(sys.argv[2])
os.umask(umask)
torchax.enable_globally()
seen: set[str] = set()
done = threading.Event()


def watch() -> None:
    # Whatever another user could reach and write, at any moment.
    while not done.is_set():
        for folder, folders, files in os.walk(target):
            folders[:] = [f for f in folders if mode_of(folder, f) & 0o001]
            seen.update(
                os.path.join(folder, n) for n in (*folders, *files) if mode_of(folder, n) & 0o002
            )


def mode_of(folder: Any, name: Any) -> Any:
    try:
        return os.lstat(os.path.join(folder, name)).st_mode
    except FileNotFoundError:
        return 0


watcher = threading.Thread(target=watch)
watcher.start()
model = mlp()
with TorchaxCheckpointer(target, preservation_policy=policies.PreserveAll()) as ckpt:
    ckpt.attach(model)
    for step in range(1, 6):
        ckpt.save(step, force=True)
    ckpt.wait_until_finished()
    ckpt.restore(2)
    ckpt.save(3, force=True)
done.set()
watcher.join()
assert not seen, seen
