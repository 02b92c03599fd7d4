"""Finds the storage rate below which ``single_replica_restore`` is faster.

    python benchmarks/replica_restore.py [--sizes 16,64,256,1024] [--rates 50,100,...] [--repeats 3]

Starts two processes on this machine, with two forced CPU devices each. They act as two slices with
the same float32 leaves. Either each slice reads the leaves itself, or one replica reads them for
both. A simulated storage limits the total rate of both slices, as a file server or a bucket's quota
does. (If each host's own network limits the rate, both slices read in parallel, and a single reader
gains nothing.) Prints a table. The files are in the page cache. gloo on loopback, which shares the
cores, stands for the network between slices.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from processes import measured, meet

NUM_LEAVES = 16


def main() -> None:
    """Takes the measurements and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--sizes", default="16,64,256,1024", help="sizes of the state in MiB")
    parser.add_argument("--rates", default="50,100,200,400,800,1600", help="storage rates in MB/s")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rates = [*sorted(float(rate) for rate in args.rates.split(",")), math.inf]
    heads = [*(f"{rate:g} MB/s" for rate in rates[:-1]), "unbounded"]
    print(f"| MiB | {' | '.join(heads)} | one for both pays below |")
    print("|---" * (len(rates) + 2) + "|", flush=True)
    for mib in map(int, args.sizes.split(",")):
        settings = json.dumps({"mib": mib, "rates": rates, "repeats": args.repeats})
        found = measured(__file__, 2, settings)
        # The slower process counts, because the other one waits for it.
        each, one = ([max(pair) for pair in zip(*(f[key] for f in found), strict=True)]
                     for key in ("each", "one"))  # fmt: skip
        cells = [f"{a:.2f} / {b:.2f} s" for a, b in zip(each, one, strict=True)]
        print(f"| {mib} | {' | '.join(cells)} | {break_even(rates, each, one)} |", flush=True)
    print("\nIn each cell: each slice reads / one replica reads for both.")


def break_even(rates: list[float], each: list[float], one: list[float]) -> str:
    """Returns the rate at which both ways take the same time.

    Interpolates between two measured rates, linearly in the time per byte.
    """
    gains = [a - b for a, b in zip(each, one, strict=True)]
    if gains[0] <= 0:
        return f"less than {rates[0]:g} MB/s"
    for i, gain in enumerate(gains):
        if gain <= 0:
            slow, fast = 1 / rates[i - 1], 1 / rates[i]
            at = fast + (slow - fast) * gain / (gain - gains[i - 1])
            return f"{1 / at:.0f} MB/s" if at else f"more than {rates[i - 1]:g} MB/s"
    return "any rate"


class Line:
    """A line from storage to all processes with a limited total rate.

    Args:
      path: a file that the processes share; it holds the time at which the line becomes free.
      rate: bytes per second.
    """

    def __init__(self, path: Path, rate: float) -> None:
        self._path, self._rate = path, rate

    def take(self, nbytes: int) -> None:
        """Waits until the line has transferred ``nbytes`` bytes."""
        with self._path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            free = max(time.monotonic(), float(file.read() or 0)) + nbytes / self._rate
            file.truncate(0)
            file.write(repr(free))
        time.sleep(max(0.0, free - time.monotonic()))


def child(index: int, count: int, port: str, root: Path, settings: dict[str, Any]) -> None:
    """Takes the measurements of one process and prints them as JSON."""
    meet(index, count, port)
    import jax
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
    from torchax_ckpt.storage.arrays import read_arrays

    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("slice", "fsdp"))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    host = np.random.default_rng(0).standard_normal((settings["mib"] * 1024 // NUM_LEAVES, 256))
    host = host.astype(np.float32)
    state = {
        f"layers.{i}.w": jax.make_array_from_callback(host.shape, sharding, lambda x: host[x])
        for i in range(NUM_LEAVES)
    }
    with TorchaxCheckpointer(root / "run") as ckpt:
        ckpt.save(1, state=state, force=True)
    arrival = read_arrays.Arrival

    def took(single: bool, rate: float) -> float:
        line = Line(root / "line", rate * 1e6)

        def delayed(committed: Any, target: Any, piece: Any, store: Any, *pace: Any) -> Any:
            line.take(piece.nbytes)
            return arrival(committed, target, piece, store, *pace)

        read_arrays.Arrival = delayed  # type: ignore[assignment, misc]
        options = CheckpointOptions(single_replica_restore=single)
        with TorchaxCheckpointer(root / "run", options=options) as ckpt:
            multihost_utils.sync_global_devices("both begin")
            began = time.perf_counter()
            jax.block_until_ready(ckpt.load(1, state))
            return time.perf_counter() - began

    times: dict[str, list[float]] = {}
    for name, single in (("each", False), ("one", True)):
        took(single, math.inf)  # Compiles.
        times[name] = [
            statistics.median(took(single, rate) for _ in range(settings["repeats"]))
            for rate in settings["rates"]
        ]
    print(json.dumps(times))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        index, count, port, root, settings = sys.argv[2:]
        child(int(index), int(count), port, Path(root), json.loads(settings))
    else:
        main()
