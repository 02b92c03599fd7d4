"""Measures saves of states that change in part only: bytes written, durable and blocking time.

    python benchmarks/unchanged.py [--states lora,half,all] [--repeats 5] [--directory /dev/shm]

Four forced CPU devices; each peer saves the same functional state, one save at a time, after six
saves to warm up. ``lora``: 24 frozen matrices [1024, 2048], with adapters of rank 8 and their
AdamW moments. ``half``: GPT-2 124M with AdamW, the first 6 of 12 layers frozen. ``all``: the same
with nothing frozen. On CPUs the library fetches and compares what did not change; on accelerators
it does neither for arrays that are the same objects.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")

import argparse
import functools
import logging
import re
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torchax
from peers import OrbaxV0, OrbaxV1, Peer
from states import gpt2, mesh, sharding

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.policies import LatestN

Arrays = dict[str, jax.Array]
NUM_WARM_UPS, KEPT = 6, 3


def arrays(shapes: dict[str, tuple[int, ...]], seed: int) -> Arrays:
    """Returns random float32 arrays, sharded over all devices where a dim allows it."""
    random, over = np.random.default_rng(seed), mesh()
    return {
        name: jax.device_put(random.standard_normal(shape, np.float32), sharding(shape, over))
        for name, shape in shapes.items()
    }


def with_moments(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of parameters, and of the two AdamW moments of each."""
    kinds = ("w", "exp_avg", "exp_avg_sq")
    return {f"{kind}/{name}": shape for kind in kinds for name, shape in shapes.items()}


def lora() -> tuple[Arrays, Arrays]:
    """Returns the frozen and the trained arrays of a fine-tuning with adapters."""
    base: dict[str, tuple[int, ...]] = {f"layers.{i}.weight": (1024, 2048) for i in range(24)}
    adapters: dict[str, tuple[int, ...]] = {}
    for i in range(24):
        adapters |= {f"layers.{i}.lora_A": (8, 2048), f"layers.{i}.lora_B": (1024, 8)}
    return arrays(base, 0), arrays(with_moments(adapters), 1)


def half(num_frozen: int = 6) -> tuple[Arrays, Arrays]:
    """Returns the frozen and the trained arrays of GPT-2 with its first layers frozen."""
    shapes = gpt2()
    early = {n for n in shapes if (m := re.match(r"h\.(\d+)\.", n)) and int(m[1]) < num_frozen}
    frozen = {name: shape for name, shape in shapes.items() if name in early}
    trained = {name: shape for name, shape in shapes.items() if name not in early}
    return arrays(frozen, 0), arrays(with_moments(trained), 1)


STATES: dict[str, Callable[[], tuple[Arrays, Arrays]]] = {
    "lora": lora,
    "half": half,
    "all": functools.partial(half, 0),
}


class Torchax(Peer):
    """This library, with or without ``reuse``."""

    def __init__(self, directory: Path, flat: Callable[[], Any], *, reuse: bool) -> None:
        options = CheckpointOptions(reuse=reuse)
        keep = LatestN(KEPT)
        self._ckpt = TorchaxCheckpointer(directory, options=options, preservation_policy=keep)
        self._flat = flat

    def save(self, step: int) -> None:
        self._ckpt.save(step, state=self._flat(), force=True)

    def wait(self) -> None:
        self._ckpt.wait_until_finished()

    def close(self) -> None:
        self._ckpt.close()


def _orbax(kind: Any, directory: Path, flat: Callable[[], Any]) -> Peer:
    return kind(directory, None, None, flat, KEPT)


PEERS: dict[str, Callable[[Path, Callable[[], Any]], Peer]] = {
    "reuse=True": functools.partial(Torchax, reuse=True),
    "reuse=False": functools.partial(Torchax, reuse=False),
    "Orbax v0": functools.partial(_orbax, OrbaxV0),
    "Orbax v1": functools.partial(_orbax, OrbaxV1),
}


def new_bytes(directory: Path, seen: set[int]) -> int:
    """Returns the bytes of the files that are not in ``seen``, and adds them."""
    total = 0
    for path in directory.rglob("*"):
        if path.is_file() and (stat := path.stat()).st_ino not in seen:
            seen.add(stat.st_ino)
            total += stat.st_size
    return total


def measure(peer: str, state: str, repeats: int, root: Path) -> list[list[float]]:
    """Returns the blocking ms, durable ms and new MB of each save after the warm-up."""
    frozen, trained = STATES[state]()
    train = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.0001, tree))

    def flat() -> Any:
        return {"frozen": frozen, "trained": trained} if frozen else {"trained": trained}

    rows: list[list[float]] = []
    directory = root / "run"
    saver = PEERS[peer](directory, flat)
    seen: set[int] = set()
    for step in range(1, NUM_WARM_UPS + repeats + 1):
        trained = jax.block_until_ready(train(trained))
        began = time.perf_counter()
        saver.save(step)
        blocking = time.perf_counter() - began
        saver.wait()
        durable = time.perf_counter() - began
        nbytes = new_bytes(directory, seen)
        if step > NUM_WARM_UPS:
            rows.append([1e3 * blocking, 1e3 * durable, nbytes / 1e6])
    saver.close()
    shutil.rmtree(directory)
    return rows


def main() -> None:
    """Prints a table for each state."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", default="lora,half,all")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", default=None, help="where to save; default: as tempfile's")
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    torchax.enable_globally()
    for state in arguments.states.split(","):
        frozen, trained = (sum(a.nbytes for a in part.values()) / 1e6 for part in STATES[state]())
        print(f"{state}: {frozen:.1f} MB frozen, {trained:.1f} MB trained")
        print(f"  {'':<12} {'new MB a save':>24} {'durable ms':>24} {'blocking ms':>24}")
        for peer in arguments.peers.split(","):
            with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
                rows = measure(peer, state, arguments.repeats, Path(scratch))
            blocking, durable, nbytes = (
                f"{statistics.median(x):.1f} ({min(x):.1f}-{max(x):.1f})"
                for x in zip(*rows, strict=True)
            )
            print(f"  {peer:<12} {nbytes:>24} {durable:>24} {blocking:>24}", flush=True)


if __name__ == "__main__":
    main()
