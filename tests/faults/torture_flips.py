"""Flips single bits of a checkpoint, one at a time, and looks at what comes back.

    python tests/faults/torture_flips.py --flips 2000

A flip is *detected* if reading the step raises (or the step is no longer offered), *harmless* if
everything that comes back is what was saved: every leaf to the bit, and the metrics. Anything else
is *wrong*. Checkpoints of both layouts, compressed and not; every file of them is hit. With
``--reader orbax`` the same flips are read by bare Orbax, which shows that wrong ones are found.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import collections
import logging
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.errors import CheckpointError

STEP = 7
METRICS = {"loss": 0.125, "note": "as written"}
Read = Callable[[Path], Any]


def state() -> dict[str, Any]:
    """Sharded, replicated, stacked and host leaves, and values that stand in the manifest."""
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    generator = np.random.default_rng(0)

    def array(*shape: int, spec: PartitionSpec, dtype: str = "float32") -> jax.Array:
        host = generator.standard_normal(shape).astype(dtype)
        return jax.device_put(host, NamedSharding(mesh, spec))

    layers = {
        str(i): {"w": array(16, 8, spec=PartitionSpec("fsdp")), "b": array(8, spec=PartitionSpec())}
        for i in range(6)
    }
    return {
        "layers": layers,
        "embedding": array(64, 32, spec=PartitionSpec(None, "fsdp"), dtype="bfloat16"),
        "host": generator.integers(0, 2**62, 33),
        "step": np.array(5, np.int64),
        "settings": {"lr": 3e-4, "name": "adamw", "betas": (0.9, 0.999), "none": None},
    }


def fingerprint(value: Any) -> Any:
    """Structure, types and bytes of a tree."""
    if isinstance(value, dict):
        return {key: fingerprint(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [fingerprint(child) for child in value])
    if isinstance(value, (jax.Array, np.ndarray)):
        host = np.asarray(value)
        return (type(value).__name__, str(host.dtype), host.shape, host.tobytes())
    return repr(value)


def by_torchax_ckpt(directory: Path) -> Any:
    """Everything that this library gives of the step; raises where it says that it is damaged."""
    ckpt = TorchaxCheckpointer(directory)
    return fingerprint({"state": ckpt.load(STEP), "metrics": ckpt.metrics(STEP)})


def by_orbax(directory: Path) -> Any:
    """Everything that bare Orbax gives of the step."""
    path = directory / str(STEP)
    found = ocp.checkpointables_metadata(path).metadata["state"]
    context = ocp.Context()
    abstract = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), found)
    with context:
        items = ocp.load_checkpointables(
            path, {"state": abstract, "manifest": None, "summary": None}
        )
    return fingerprint({name: items[name] for name in ("state", "manifest", "summary")})


def checkpoints(root: Path) -> Iterator[tuple[str, Path]]:
    """One checkpoint for each layout, compressed and not."""
    for layout in ("stacked", "flat"):
        for compression in (False, True):
            name = f"{layout}{', compressed' if compression else ''}"
            directory = root / name.replace(", ", "-")
            options = CheckpointOptions(layout=layout, compression=compression)
            with TorchaxCheckpointer(directory, options=options) as ckpt:
                ckpt.save(STEP, state=state(), metrics=METRICS)
            yield name, directory


def flip(path: Path, bit: int) -> None:
    """Inverts one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (octet,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([octet ^ (1 << bit % 8)]))


def outcome(read: Read, directory: Path, expected: Any) -> str:
    """What reading a damaged checkpoint comes to."""
    try:
        found = read(directory)
    except CheckpointError:
        return "detected"
    except Exception as error:
        # Bare Orbax has no errors of its own; from this library any other error is a defect.
        return "detected" if read is by_orbax else f"crashed: {type(error).__name__}"
    return "harmless" if found == expected else "wrong"


def torture(read: Read, root: Path, flips: int, seed: int) -> dict[str, collections.Counter[str]]:
    """Outcomes by checkpoint; every file gets its share of the flips."""
    generator = random.Random(seed)
    table: dict[str, collections.Counter[str]] = {}
    for name, directory in checkpoints(root):
        table[name] = collections.Counter()
        expected = read(directory)
        files = sorted(p for p in directory.rglob("*") if p.is_file() and p.stat().st_size)
        for turn in range(flips // 4):
            path = files[turn % len(files)]
            bit = generator.randrange(8 * path.stat().st_size)
            flip(path, bit)
            result = outcome(read, directory, expected)
            table[name][result] += 1
            if result not in ("detected", "harmless") and read is by_torchax_ckpt:
                print(f"{result}: bit {bit} of {path.relative_to(directory)}", flush=True)
            flip(path, bit)
        assert read(directory) == expected, "the checkpoint was not put back together"
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", choices=("torchax_ckpt", "orbax"), default="torchax_ckpt")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    read = by_torchax_ckpt if args.reader == "torchax_ckpt" else by_orbax
    with tempfile.TemporaryDirectory() as root:
        table = torture(read, Path(root), args.flips, args.seed)
    kinds = ["detected", "harmless", *sorted({k for c in table.values() for k in c})]
    kinds = list(dict.fromkeys([*kinds, "wrong"]))
    print(f"{'checkpoint':20}" + "".join(f"{kind:>12}" for kind in kinds))
    for name, counts in table.items():
        print(f"{name:20}" + "".join(f"{counts[kind]:12}" for kind in kinds))
    bad = sum(n for c in table.values() for kind, n in c.items() if kind not in kinds[:2])
    print(f"{bad} flips went wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
