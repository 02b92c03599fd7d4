"""Measures the size and the speed of compressed saves in memory, to see on which media they pay.

    python benchmarks/compressing.py [DIRECTORY] [--mbytes 512] [--repeats 5]

DIRECTORY should be in memory (/dev/shm, the default). Prints, for weights and moments of AdamW, the
compressed fraction of the bytes, and the rates of saves with and without compression. On a medium
slower than the compressed rate, compressed saves are faster, at most by the fraction of bytes that
compression removes.
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

import jax
import ml_dtypes
import numpy as np
from states import mesh, sharding

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer

ROWS = 1 << 10


def contents(mbytes: int) -> dict[str, dict[str, jax.Array]]:
    """Returns arrays [1024, n], sharded over the devices, by kind and name."""
    columns = (mbytes << 20) // (16 * ROWS * 4)
    draw = np.random.default_rng(0)
    weights = draw.standard_normal((16, ROWS, columns), dtype=np.float32) * 0.02
    kinds = {
        "float32 weights": weights,
        "bfloat16 weights": weights.astype(ml_dtypes.bfloat16),
        "AdamW's second moments": np.square(weights) * np.float32(1e-6),
    }
    return {
        kind: {
            f"w{i}": jax.device_put(part, sharding(part.shape, mesh()))
            for i, part in enumerate(host)
        }
        for kind, host in kinds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", nargs="?", default="/dev/shm")
    parser.add_argument("--mbytes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(f"{os.cpu_count()} cores; medians of {args.repeats}, with the range")
    for kind, arrays in contents(args.mbytes).items():
        nbytes = sum(array.nbytes for array in arrays.values())
        for compression in (False, True):
            root = Path(tempfile.mkdtemp(dir=args.directory))
            options = CheckpointOptions(compression=compression, snapshot="reference")
            rates = []
            with TorchaxCheckpointer(root, options=options) as ckpt:
                for step in range(args.repeats + 1):
                    began = time.perf_counter()
                    ckpt.save(step, state=arrays, force=True)
                    ckpt.wait_until_finished()
                    rates.append(nbytes / (time.perf_counter() - began) / 1e6)
                files = (root / str(args.repeats)).rglob("*")
                stored = sum(file.stat().st_size for file in files if file.is_file())
            shutil.rmtree(root)
            print(
                f"{kind}, {'compressed' if compression else 'as they are'}: "
                f"{stored / nbytes:.1%} of the bytes, {statistics.median(rates[1:]):.0f} MB/s "
                f"({min(rates[1:]):.0f} to {max(rates[1:]):.0f})"
            )


if __name__ == "__main__":
    main()
