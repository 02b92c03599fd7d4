"""Finds the leaf size up to which stacking is faster, from durable and restore times.

    python benchmarks/stacking.py [--snapshot reference] [--sizes 16,64] [--counts 2,64]

Uses equal float32 leaves, sharded over four forced CPU devices. Prints a table, and the largest
leaf size for which saving and restoring take less time stacked. The library's limit is
``MAX_STACKED_LEAF_BYTES`` in ``torchax_ckpt/layout/storage_plan.py``.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")

import argparse
import logging
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torchax
from states import mesh, sharding

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer

KIB = 1 << 10
MAX_BYTES = 512 << 20
LAYOUTS = ("flat", "stacked")


def leaves(count: int, nbytes: int, seed: int) -> dict[str, jax.Array]:
    """Returns ``count`` float32 arrays [nbytes / 1024, 256], sharded on the first dim."""
    shape = (nbytes // 1024, 256)
    block = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    where = sharding(shape, mesh())
    return {f"layers.{i}.w": jax.device_put(block + i, where) for i in range(count)}


def measure(
    count: int, nbytes: int, layout: Any, snapshot: Any, repeats: int, root: Path
) -> tuple[float, float]:
    """Returns the median seconds of a durable save and of a restore, each after a warm-up."""
    state, other = leaves(count, nbytes, 0), leaves(count, nbytes, 1)
    jax.block_until_ready((state, other))
    durable, restore = [], []
    options = CheckpointOptions(layout=layout, snapshot=snapshot)
    with TorchaxCheckpointer(root / "run", options=options) as ckpt:
        for step in range(repeats + 1):
            began = time.perf_counter()
            ckpt.save(step, state=state, force=True)
            ckpt.wait_until_finished()
            durable.append(time.perf_counter() - began)
        for _ in range(repeats + 1):
            began = time.perf_counter()
            jax.block_until_ready(ckpt.load(abstract_state=other))
            restore.append(time.perf_counter() - began)
    shutil.rmtree(root / "run")
    return statistics.median(durable[1:]), statistics.median(restore[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--snapshot", default="reference")
    parser.add_argument(
        "--sizes", default="16,64,256,512,1024,2048,4096,8192", help="leaf sizes in KiB"
    )
    parser.add_argument("--counts", default="64,128,256,512", help="numbers of leaves")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", help="folder of the checkpoints; default: a temporary one")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torchax.enable_globally()
    print("| leaves | of | durable: alone | stacked | restore: alone | stacked | both |")
    print("|---|---|---|---|---|---|---|")
    totals: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as temporary:
        for nbytes in (int(size) * KIB for size in args.sizes.split(",")):
            for count in map(int, args.counts.split(",")):
                if count * nbytes > MAX_BYTES or (count in (128, 256) and nbytes < 1 << 20):
                    continue
                flat, stacked = (
                    measure(count, nbytes, layout, args.snapshot, args.repeats, Path(temporary))
                    for layout in LAYOUTS
                )
                pair = totals.setdefault(nbytes, [0.0, 0.0])
                pair[:] = pair[0] + sum(flat), pair[1] + sum(stacked)
                seconds = [flat[0], stacked[0], flat[1], stacked[1]]
                row = [str(count), f"{nbytes // KIB:,} KiB", *(f"{s:.2f} s" for s in seconds)]
                print(f"| {' | '.join(row)} | x {sum(stacked) / sum(flat):.2f} |", flush=True)
    pays = [size for size, (flat_secs, stacked_secs) in totals.items() if stacked_secs < flat_secs]
    print(f"\nstacking is faster for leaves of up to {max(pays, default=0) // KIB:,} KiB")


if __name__ == "__main__":
    main()
