"""Saves a donated state again and again, and prints what that costs the training and the host.

    python benchmarks/accelerator.py --gigabytes 10 --saves 200 --snapshot copy offload auto

The state is sharded over all devices and donated by every step. Saves are continuous: each begins
when the last one is durable. For each mode of snapshots, in a process of its own, the program
prints:

- how long ``save`` blocks the training thread;
- how long a step takes while a save is in flight, against steps before the first save;
- the resident memory of the process after five saves and after all of them.

With ``--keep-buffers`` the steps do not donate, so that in the mode ``auto`` saves hold references.

On CPU devices, the memory kinds of host and devices are one memory, and a step shares the cores
with the save: only the memory is of interest there.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import logging
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies

WIDTH = 1024
NUM_FEW = 5
HEADER = (
    "| snapshot | taken by | state | saves | blocking | step before | step during a save | "
    f"memory after {NUM_FEW} saves | after all |\n|---|---|---|---|---|---|---|---|---|"
)


def resident_bytes() -> int:
    gc.collect()
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found, "Linux"
    return int(found[1]) << 10


def state_of(num_bytes: float) -> dict[str, jax.Array]:
    """Layers of a matrix and two vectors, sharded along the first dim."""
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("fsdp",)), PartitionSpec("fsdp"))
    make = jax.jit(
        lambda key: (jax.random.normal(key, (WIDTH, WIDTH)), jnp.ones(WIDTH), jnp.zeros(WIDTH)),
        out_shardings=(rows, rows, rows),
    )
    leaves = {}
    for i in range(max(1, round(num_bytes / 4 / (WIDTH + 2) / WIDTH))):
        for name, leaf in zip(("weight", "scale", "bias"), make(jax.random.key(i)), strict=True):
            leaves[f"layers.{i}.{name}"] = leaf
    return leaves


def _step(state: dict[str, jax.Array], matrix: jax.Array) -> tuple[dict[str, jax.Array], Any]:
    matrix = matrix @ matrix / WIDTH
    return {name: leaf * 1.0001 for name, leaf in state.items()}, matrix


def ms(times: list[float]) -> str:
    """The median of seconds, with the quartiles, in milliseconds."""
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75]) * 1e3
    return f"{middle:.1f} ms ({low:.1f}-{high:.1f})"


def measure(mode: str, asked: argparse.Namespace, directory: str) -> str:
    """Returns the row of the table for one mode of snapshots."""
    state, matrix = state_of(asked.gigabytes * 1e9), jnp.ones((WIDTH, WIDTH))
    num_bytes = sum(leaf.nbytes for leaf in state.values())
    step = jax.jit(_step, donate_argnums=() if asked.keep_buffers else 0)
    ways: list[str] = []
    before: list[float] = []
    during: list[float] = []
    blocking: list[float] = []
    options = CheckpointOptions(snapshot=cast(Any, mode), compression=False)
    with TorchaxCheckpointer(
        directory, options=options, preservation_policy=policies.LatestN(1)
    ) as ckpt:
        take = ckpt._run.snapshotter.take

        def taken(*leaves: Any) -> Any:
            snapshot = take(*leaves)
            ways.append(snapshot.way)
            return snapshot

        ckpt._run.snapshotter.take = taken  # type: ignore[method-assign, assignment]
        number, after_few = 0, 0
        while len(blocking) < asked.saves:
            number += 1
            began = time.perf_counter()
            state, matrix = step(state, matrix)
            jax.block_until_ready(matrix)
            (during if blocking else before).append(time.perf_counter() - began)
            if number <= 20:  # steps without saves; the first of them compiles
                continue
            began = time.perf_counter()
            if ckpt.save(number, state=state):
                blocking.append(time.perf_counter() - began)
                if len(blocking) == NUM_FEW:
                    ckpt.wait_until_finished()
                    after_few = resident_bytes()
        ckpt.wait_until_finished()
        after_all = resident_bytes()
    way = statistics.mode(ways)
    return (
        f"| {mode} | {way} | {num_bytes / 1e9:.2f} GB | {len(blocking)} | {ms(blocking[2:])} | "
        f"{ms(before[2:])} | {ms(during[2:])} | {after_few / 1e9:.3f} GB | "
        f"{after_all / 1e9:.3f} GB ({after_all / after_few - 1:+.1%}) |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=10, help="bytes of the state, in 1e9")
    parser.add_argument("--saves", type=int, default=200)
    parser.add_argument("--snapshot", nargs="+", default=["copy", "offload", "auto"])
    parser.add_argument("--keep-buffers", action="store_true", help="do not donate the state")
    parser.add_argument("--directory", help="where to save; default: a temporary directory")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    if asked.saves <= NUM_FEW:
        parser.error(f"--saves: expected more than {NUM_FEW}, found {asked.saves}")
    if asked.one:
        device = jax.devices()[0]
        print(f"{len(jax.devices())} devices of {device.device_kind}, jax {jax.__version__}")
        with tempfile.TemporaryDirectory(dir=asked.directory) as folder:
            print(measure(asked.snapshot[0], asked, folder))
        return
    for number, mode in enumerate(asked.snapshot):
        command = [sys.executable, __file__, "--one", "--snapshot", mode]
        command += ["--gigabytes", str(asked.gigabytes), "--saves", str(asked.saves)]
        if asked.keep_buffers:
            command.append("--keep-buffers")
        if asked.directory:
            command += ["--directory", asked.directory]
        # This process starts no JAX backend, because only one process can hold a TPU.
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        *_, devices, row = told.splitlines()
        if number == 0:
            print(f"{datetime.date.today()}, {devices}\n\n{HEADER}")
        print(row, flush=True)


if __name__ == "__main__":
    main()
