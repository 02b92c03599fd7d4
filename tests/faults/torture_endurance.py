"""Saves many times in one process, and watches its memory, threads and open files.

    python tests/faults/torture_endurance.py --saves 10000

A line in the log of training is a tiny leak times ten thousand. What is compared is the end of the
run with its first tenth, by when caches are full and allocators have settled; free memory is given
back to the system before each look. ``--leak`` keeps a state, a thread, an open file and some
memory of every save, which shows that growth is found.

What is left grows in the libraries below: TensorStore 0.1.86 loses 290 bytes in every
``KvStore.Spec.to_json``, which Orbax calls for each array of a save, and Orbax keeps the names of
its signals. Eight arrays make that 3.2 KiB per save, seen over 1,500 saves.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import ctypes
import gc
import logging
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.policies import LatestN

# Half as much again as the libraries below lose, and what allocators may keep on the way.
MAX_GROWTH_BYTES_PER_SAVE = 5 << 10
MAX_GROWTH_BYTES = 4 << 20
# More than that, for a short run.
LEAKED_BYTES_PER_SAVE = 1 << 19


def usage() -> dict[str, int]:
    """Resident bytes, threads, open files and live arrays of this process."""
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc's
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "threads": threading.active_count(),
        "open_files": len(os.listdir("/proc/self/fd")),
        "live_arrays": len(jax.live_arrays()),
    }


def endure(directory: Path, saves: int, leak: bool) -> list[tuple[int, dict[str, int]]]:
    """Saves a changing state again and again; usage at the beginning, and ten times after."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    state: dict[str, Any] = {
        str(i): jax.device_put(np.ones((64, 16), np.float32), sharding) for i in range(8)
    }
    step_once = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.0001, tree))
    kept: list[Any] = []
    seen = []
    with TorchaxCheckpointer(directory, preservation_policy=LatestN(2)) as ckpt:
        for step in range(1, saves + 1):
            state = step_once(state)
            if leak:
                kept.append(jax.tree.map(lambda x: x + 0, state))
                kept.append(os.urandom(LEAKED_BYTES_PER_SAVE))
                kept.append(open(os.devnull))  # noqa: SIM115 - never closed, on purpose
                threading.Thread(target=threading.Event().wait, daemon=True).start()
            ckpt.save(step, state={"params": state, "lr": 1 / step}, force=True)
            if step % max(1, saves // 10) == 0:
                ckpt.wait_until_finished()
                seen.append((step, usage()))
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=10_000)
    parser.add_argument("--leak", action="store_true")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        seen = endure(Path(root), args.saves, args.leak)
    print(f"{'saves':>8}{'resident MiB':>14}{'threads':>9}{'open files':>12}{'live arrays':>13}")
    for step, use in seen:
        print(
            f"{step:8}{use['resident_bytes'] / 2**20:14.1f}{use['threads']:9}"
            f"{use['open_files']:12}{use['live_arrays']:13}"
        )
    # The least of the last three looks: a file may be open for a moment, what leaks stays.
    first = seen[0][1]
    last = {name: min(use[name] for _, use in seen[-3:]) for name in first}
    num_saves = seen[-1][0] - seen[0][0]
    allowed = {"resident_bytes": MAX_GROWTH_BYTES + num_saves * MAX_GROWTH_BYTES_PER_SAVE}
    grown = [name for name in first if last[name] - first[name] > allowed.get(name, 0)]
    per_save = (last["resident_bytes"] - first["resident_bytes"]) / num_saves
    print(f"memory grew by {per_save / 2**10:.1f} KiB per save")
    print(f"{args.saves} saves in {time.perf_counter() - began:.0f} s; grown: {grown or 'nothing'}")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
