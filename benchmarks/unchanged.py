"""Measures saves of states that are frozen in part: bytes written, durable and blocking time.

    python benchmarks/unchanged.py [--states lora,adapters,host,leaves,half] [--repeats 5]
        [--directory /dev/shm]
    python benchmarks/unchanged.py --states lora --one reuse    prints one peer's figures for run.py

Four forced CPU devices; each peer saves the same functional state, one save at a time, after six
saves to warm up. ``lora``: 24 frozen matrices [1024, 2048], with adapters of rank 8 and their
AdamW moments. ``host``: the same with the matrices on the host. ``leaves``: 3,072 frozen matrices
[64, 128], with the adapters. ``half``: GPT-2 124M with AdamW, the first 6 of 12 layers frozen.

The peers "reuse" and "by identity" name the frozen arrays with a pattern; where there are none,
"reuse" names nothing. On CPUs the library fetches and compares what is frozen. On TPUs it does
neither for arrays that are the same objects: the peer "by identity" saves as if the devices were
TPUs. The bytes that are fetched from devices are counted in the library only. The peer "digests"
only takes digests of 128 bits of the frozen arrays, on two threads: the least that a comparison
takes.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")

import argparse
import functools
import json
import logging
import re
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torchax
import xxhash
from peers import OrbaxV0, OrbaxV1, Peer
from states import gpt2, mesh, sharding

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.policies import LatestN
from torchax_ckpt.saving.reuse import known
from torchax_ckpt.storage.writing import array_writer

Arrays = dict[str, Any]
NUM_WARM_UPS, KEPT = 6, 3
IS_PROOF = known.is_proof


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
    return arrays(base, 0), adapters()


def adapters() -> Arrays:
    """Returns adapters of rank 8 for 24 layers, with their moments."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(24):
        shapes |= {f"layers.{i}.lora_A": (8, 2048), f"layers.{i}.lora_B": (1024, 8)}
    return arrays(with_moments(shapes), 1)


def host() -> tuple[Arrays, Arrays]:
    """Returns the arrays of ``lora``, the frozen ones on the host."""
    frozen, trained = lora()
    return {name: np.array(array) for name, array in frozen.items()}, trained


def leaves() -> tuple[Arrays, Arrays]:
    """Returns many small frozen arrays, and the trained arrays of ``lora``."""
    shapes: dict[str, tuple[int, ...]] = {f"layers.{i}.weight": (64, 128) for i in range(3072)}
    return arrays(shapes, 0), adapters()


def half() -> tuple[Arrays, Arrays]:
    """Returns the frozen and the trained arrays of GPT-2 with its first layers frozen."""
    shapes = gpt2()
    early = {n for n in shapes if (m := re.match(r"h\.(\d+)\.", n)) and int(m[1]) < 6}
    frozen = {name: shape for name, shape in shapes.items() if name in early}
    trained = {name: shape for name, shape in shapes.items() if name not in early}
    return arrays(frozen, 0), arrays(with_moments(trained), 1)


STATES: dict[str, Callable[[], tuple[Arrays, Arrays]]] = {
    "lora": lora,
    "adapters": lambda: ({}, adapters()),
    "host": host,
    "leaves": leaves,
    "half": half,
}


class Torchax(Peer):
    """This library, with or without reuse of what is frozen; by identity if it saves as on TPUs."""

    def __init__(
        self, directory: Path, flat: Callable[[], Any], *, reuse: bool, by_identity: bool = False
    ) -> None:
        is_array = lambda array: isinstance(array, jax.Array)  # noqa: E731
        known.is_proof = is_array if by_identity else IS_PROOF
        patterns = ["state/frozen"] if reuse and "frozen" in flat() else False
        options = CheckpointOptions(reuse=patterns)
        keep = LatestN(KEPT)
        self._ckpt = TorchaxCheckpointer(directory, options=options, preservation_policy=keep)
        self._flat = flat

    def save(self, step: int) -> None:
        self._ckpt.save(step, state=self._flat(), force=True)

    def wait(self) -> None:
        self._ckpt.wait_until_finished()

    def close(self) -> None:
        self._ckpt.close()


class Digests(Peer):
    """Saves nothing; takes digests of what is frozen."""

    def __init__(self, directory: Path, flat: Callable[[], Any]) -> None:
        directory.mkdir()
        self._flat = flat

    def save(self, step: int) -> None:
        shards: list[Any] = []
        for array in self._flat().get("frozen", {}).values():
            parts = [s.data for s in getattr(array, "addressable_shards", ())] or [array]
            shards += map(np.asarray, parts)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(xxhash.xxh3_128_digest, shards))


def _orbax(kind: Any, directory: Path, flat: Callable[[], Any]) -> Peer:
    return kind(directory, None, None, flat, KEPT)


PEERS: dict[str, Callable[[Path, Callable[[], Any]], Peer]] = {
    "by identity": functools.partial(Torchax, reuse=True, by_identity=True),
    "reuse": functools.partial(Torchax, reuse=True),
    "no reuse": functools.partial(Torchax, reuse=False),
    "digests": Digests,
    "Orbax v0": functools.partial(_orbax, OrbaxV0),
    "Orbax v1": functools.partial(_orbax, OrbaxV1),
}


def counting_fetched() -> list[int]:
    """Lets the library count the bytes that it fetches from devices; returns the counts."""
    counts: list[int] = []
    start = array_writer._start_fetch

    def counted(array: Any, *scratch: Any) -> Any:
        counts.append(array.size * array.dtype.itemsize)
        return start(array, *scratch)

    array_writer._start_fetch = counted  # type: ignore[assignment]
    return counts


def new_bytes(directory: Path, seen: set[int]) -> int:
    """Returns the bytes of the files that are not in ``seen``, and adds them."""
    total = 0
    for path in directory.rglob("*"):
        if path.is_file() and (stat := path.stat()).st_ino not in seen:
            seen.add(stat.st_ino)
            total += stat.st_size
    return total


def measure(
    peer: str, state: str, repeats: int, root: Path, fetched: list[int]
) -> list[list[float]]:
    """Returns the blocking ms, durable ms, fetched MB and new MB of each save after the warm-up."""
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
        fetched.clear()
        began = time.perf_counter()
        saver.save(step)
        blocking = time.perf_counter() - began
        saver.wait()
        durable = time.perf_counter() - began
        nbytes = new_bytes(directory, seen)
        if step > NUM_WARM_UPS:
            rows.append([1e3 * blocking, 1e3 * durable, sum(fetched) / 1e6, nbytes / 1e6])
    saver.close()
    shutil.rmtree(directory)
    return rows


def main() -> None:
    """Prints a table for each state."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", default=",".join(STATES))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", default=None, help="where to save; default: as tempfile's")
    parser.add_argument("--one", choices=PEERS, help="prints what this peer takes as JSON")
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    torchax.enable_globally()
    fetched = counting_fetched()
    if arguments.one:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
            rows = measure(
                arguments.one, arguments.states, arguments.repeats, Path(scratch), fetched
            )
        blocking, durable, _, nbytes = zip(*rows, strict=True)
        frozen, trained = (sum(a.nbytes for a in p.values()) for p in STATES[arguments.states]())
        found = {"blocking": blocking, "durable": durable, "new": nbytes}
        print("RESULT " + json.dumps({"frozen": frozen, "trained": trained, **found}))
        return
    columns = ("new MB a save", "fetched MB", "durable ms", "blocking ms")
    for state in arguments.states.split(","):
        frozen, trained = (sum(a.nbytes for a in part.values()) / 1e6 for part in STATES[state]())
        print(f"{state}: {frozen:.1f} MB frozen, {trained:.1f} MB trained")
        print(f"  {'':<12}", *(f"{column:>24}" for column in columns))
        for peer in arguments.peers.split(","):
            with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
                rows = measure(peer, state, arguments.repeats, Path(scratch), fetched)
            cells = [
                f"{statistics.median(x):.1f} ({min(x):.1f}-{max(x):.1f})"
                for x in zip(*rows, strict=True)
            ]
            if peer.startswith("Orbax"):
                cells[2] = "not counted"
            print(f"  {peer:<12}", *(f"{cell:>24}" for cell in reversed(cells)), flush=True)


if __name__ == "__main__":
    main()
