"""Saves many times in one process, and watches its memory, threads and open files.

A line in the log of training is a tiny leak times ten thousand. What is compared is the end of the
run with its first tenth, by when caches are full and allocators have settled; free memory is given
back to the system before each look.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.policies import LatestN

if TYPE_CHECKING:
    from torture import Torture

# Resident bytes, threads, open files and live arrays; only the first may grow, by what allocators
# may keep on the way. 10,000 saves added 50 bytes each.
MAX_GROWTH_BYTES_PER_SAVE, MAX_GROWTH_BYTES = 1 << 10, 4 << 20
MEASURES = ("resident KiB", "threads", "open files", "live arrays")
FINDINGS = tuple(f"growth of {measure}" for measure in MEASURES)
# Keeps a state, a thread, an open file and some memory of every save.
WEAKENINGS = ("leak",)
LEAKED_BYTES_PER_SAVE = 1 << 19


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def usage() -> list[int]:
    """What this process has, by ``MEASURES``."""
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc's
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * os.sysconf("SC_PAGE_SIZE") >> 10
    files = len(os.listdir("/proc/self/fd"))
    return [resident, threading.active_count(), files, len(jax.live_arrays())]


def torture(torture: Torture) -> None:
    """Saves a changing state again and again, and looks ten times."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    state: dict[str, Any] = {
        str(i): jax.device_put(np.ones((64, 16), np.float32), sharding) for i in range(8)
    }
    step_once = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.0001, tree))
    kept: list[Any] = []
    seen: list[list[int]] = []
    count = torture.given.count
    every = max(1, count // 10)
    with TorchaxCheckpointer(torture.scratch / "run", preservation_policy=LatestN(2)) as ckpt:
        for step in torture.rounds():
            state = step_once(state)
            if torture.given.weakened:
                kept.append(jax.tree.map(lambda x: x + 0, state))
                kept.append(os.urandom(LEAKED_BYTES_PER_SAVE))
                kept.append(open(os.devnull))  # noqa: SIM115 - never closed, on purpose
                threading.Thread(target=threading.Event().wait, daemon=True).start()
            ckpt.save(step, state={"params": state, "lr": 1 / step}, force=True)
            torture.count("saves")
            if step % every == 0:
                ckpt.wait_until_finished()
                seen.append(usage())
                print(f"{step:8}", *(f"{u:9} {m}" for u, m in zip(seen[-1], MEASURES, strict=True)))
    # The least of the last three looks: a file may be open for a moment, what leaks stays.
    num_saves = (len(seen) - 1) * every
    for row, *use in zip(FINDINGS, seen[0], *seen[-3:], strict=True):
        grown = min(use[1:]) - use[0]
        torture.count(row.replace("growth", "change"), grown)
        allowed = (MAX_GROWTH_BYTES + num_saves * MAX_GROWTH_BYTES_PER_SAVE) >> 10
        if grown > (allowed if row == FINDINGS[0] else 0):
            torture.find({row: [f"{row}: by {grown} in {num_saves} saves"]})
