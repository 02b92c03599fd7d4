"""Saves many times, and watches what each process of the run has: memory, threads, open files, ...

A line in the log of training is a tiny leak times ten thousand. What is compared is the end of the
run with the third of ten looks, by when caches are full and allocators have settled; free memory is
given back to the system before each look. Where the package keeps the newest of something, it keeps
five.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcs_server import FaultyServer
from starts import free_port

if TYPE_CHECKING:
    from torture import Torture

# Resident bytes, threads, open files, live arrays, and the entries of all lists, dicts and so on to
# which the checkpointer leads. The first may grow by what allocators may keep on the way: 10,000
# saves added 50 bytes each. The last may grow by what happens to wait in queues.
MAX_GROWTH_BYTES_PER_SAVE, MAX_GROWTH_BYTES, MAX_ENTRIES = 1 << 10, 4 << 20, 40
MAX_CONNECTIONS = 8  # more than at the first look, in the pools of a bucket's clients
MEASURES = ("resident KiB", "threads", "open files", "live arrays", "entries held")
FINDINGS = tuple(f"growth of {measure}" for measure in MEASURES)
# Keeps a state, a thread, an open file and some memory of every save.
WEAKENINGS = ("leak",)
LEAKED_BYTES_PER_SAVE = 1 << 19


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=1, help="of the run")
    parser.add_argument("--bucket", action="store_true", help="save to an emulated bucket")


def torture(torture: Torture) -> None:
    """Runs the processes, and compares what each had at ten moments."""
    given, here = torture.given, Path(__file__).parent
    with contextlib.ExitStack() as stack:
        run, port = str(torture.scratch / "run"), free_port()
        environment = {**os.environ, "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}"}
        environment["PYTHONPATH"] = f"{here.parents[1]}:{here.parent}"
        if given.bucket:
            gcs = stack.enter_context(contextlib.closing(FaultyServer()))
            environment |= gcs.environment()
            run = "gs://bucket/run"
        settings = [run, given.count, given.seconds, given.weakened or "", given.processes, port]
        started = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, *map(str, [*settings, index])],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for index in range(given.processes)
        ]
        for index, process in enumerate(started):
            output, _ = process.communicate()
            assert process.returncode == 0, f"process {index} ended with {process.returncode}"
            _judge(torture, index, [json.loads(line) for line in output.splitlines()])


def _judge(torture: Torture, index: int, seen: list[list[int]]) -> None:
    for step, *uses in seen:
        texts = (f"{use:9} {measure}" for use, measure in zip(uses, MEASURES, strict=True))
        print(f"{index}: {step:8}", *texts)
    first, *before = seen[2]
    num_saves = seen[-1][0] - first
    if index == 0:
        torture.count("saves", seen[-1][0])
    allowed = dict.fromkeys(FINDINGS, 0)
    allowed[FINDINGS[0]] = (MAX_GROWTH_BYTES + num_saves * MAX_GROWTH_BYTES_PER_SAVE) >> 10
    allowed[FINDINGS[-1]] = MAX_ENTRIES
    allowed[FINDINGS[2]] = MAX_CONNECTIONS if torture.given.bucket else 0
    # The least of the last three looks: a file may be open for a moment, what leaks stays.
    for row, use, *last in zip(FINDINGS, before, *(uses for _, *uses in seen[-3:]), strict=True):
        grown = min(last) - use
        torture.count(row.replace("growth", "change"), grown, f"of process {index}")
        if grown > allowed[row]:
            torture.find({row: [f"process {index}: {row}: by {grown} in {num_saves} saves"]})


# --- the program ---------------------------------------------------------------------------------


def usage(checkpointer: Any) -> list[int]:
    """What this process has, by ``MEASURES``."""
    import jax
    from support.held import held

    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc's
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * os.sysconf("SC_PAGE_SIZE") >> 10
    files = len(os.listdir("/proc/self/fd"))
    entries = sum(held(checkpointer).values())
    return [resident, threading.active_count(), files, len(jax.live_arrays()), entries]


def save(
    run: str, count: int, max_secs: float, weakened: str, processes: int, port: str, index: int
) -> None:
    """Saves a changing state again and again, and looks ten times."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from torchax_ckpt import TorchaxCheckpointer
    from torchax_ckpt.policies import FixedIntervalPolicy, LatestN
    from torchax_ckpt.processes import call_log
    from torchax_ckpt.saving import tier
    from torchax_ckpt.storage.medium import bucket_medium
    from torchax_ckpt.telemetry import journal, recorder

    call_log._REMEMBERED = recorder._MAX_VALUES = tier._LOGGED_SAVES = 5
    bucket_medium._USED_NAMES, journal.MAX_FILE_BYTES = 5, 4000
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, index)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    host = np.ones((64, 16), np.float32)
    state: dict[str, Any] = {
        str(i): jax.make_array_from_callback(host.shape, sharding, lambda part: host[part])
        for i in range(8)
    }
    step_once = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.0001, tree))
    kept: list[Any] = []
    end = time.monotonic() + (max_secs if processes == 1 else float("inf"))
    every = max(1, count // 10)
    with TorchaxCheckpointer(
        run, save_decision_policy=FixedIntervalPolicy(1), preservation_policy=LatestN(2)
    ) as ckpt:
        ckpt._saver.tier.costs._unobserved = collections.deque(maxlen=5)
        ckpt.attach(stateful={"nothing": _Nothing()})
        for step in range(1, count + 1):
            state = jax.block_until_ready(step_once(state))
            if weakened:
                kept.append(jax.tree.map(lambda x: x + 0, state))
                kept.append(os.urandom(LEAKED_BYTES_PER_SAVE))
                kept.append(open(os.devnull))  # noqa: SIM115 - never closed, on purpose
                threading.Thread(target=threading.Event().wait, daemon=True).start()
                setattr(ckpt, f"kept_{step}", list(range(MAX_ENTRIES)))
            ckpt.save(step, state={"params": state}, metrics={"loss": 1 / step})
            if step % every == 0 and time.monotonic() < end:
                ckpt.wait_until_finished()
                print(json.dumps([step, *usage(ckpt)]), flush=True)


class _Nothing:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


if __name__ == "__main__":
    run, count, max_secs, weakened, processes, port, index = sys.argv[1:]
    save(run, int(count), float(max_secs), weakened, int(processes), port, int(index))
