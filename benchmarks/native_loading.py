"""Compares ``dcp.load`` of a step with ``dcp.load`` of a folder that ``dcp.save`` wrote, in plain
PyTorch: the same model and AdamW state, each load in a process of its own, alternating.

    python benchmarks/native_loading.py [--state gpt2] [--rounds 5] [--directory /dev/shm]

Prints the median and the range of each in seconds. The tensors exist before, and their memory was
written once; imports are not counted. The step was saved from eight simulated devices, and is
compared with its digests; DCP's folder has none. ``held`` is DCP's folder, loaded into new tensors
and copied from these once all is read, as a load must that changes all tensors or none.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def save(state: str, folder: str) -> None:
    """Saves the state with torchax, on eight simulated devices."""
    import states

    from torchax_ckpt import TorchaxCheckpointer

    model, optimizer = states.build(state)
    with TorchaxCheckpointer(f"{folder}/run") as ckpt:
        ckpt.attach(model, optimizer)
        ckpt.save(1, force=True)


def load(folder: str, way: str) -> float:
    """Loads in one way; returns seconds. With ``convert``, writes DCP's folder."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from torchax_ckpt.torch import StorageReader

    reader: Any = StorageReader(f"{folder}/run")
    if way in ("dcp", "held"):
        reader = dcp.FileSystemReader(f"{folder}/dcp")
    found = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.ones(tuple(known.size), dtype=known.properties.dtype)
        for name, known in found.items()
        if isinstance(known, TensorStorageMetadata) and not name.startswith("rng")
    }
    began = time.perf_counter()
    held = {n: torch.empty_like(t) for n, t in tensors.items()} if way == "held" else tensors
    dcp.load(held, storage_reader=reader, no_dist=True)
    if way == "held":
        for name, tensor in tensors.items():
            tensor.copy_(held[name])
    secs = time.perf_counter() - began
    if way == "convert":
        dcp.save(tensors, checkpoint_id=f"{folder}/dcp", no_dist=True)
    return secs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", default="gpt2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default="/dev/shm")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is not None:
        folder, way = args.run
        if way == "save":
            save(args.state, folder)
        else:
            print(load(folder, way))
        return
    secs: dict[str, list[float]] = {"step": [], "dcp": [], "held": []}
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:

        def ran(way: str) -> Any:
            command = [sys.executable, __file__, "--state", args.state, "--run", folder, way]
            found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            return found.stdout and float(found.stdout)

        ran("save")
        ran("convert")
        nbytes = sum(path.stat().st_size for path in Path(folder, "dcp").iterdir())
        for _ in range(args.rounds):
            for way, known in secs.items():
                known.append(ran(way))
    for way, known in secs.items():
        median, low, high = statistics.median(known), min(known), max(known)
        print(f"{way:5} {median:.2f} ({low:.2f} - {high:.2f}) s for {nbytes / 1e6:.0f} MB")
    for way in ("step", "held"):
        ratio = statistics.median(secs[way]) / statistics.median(secs["dcp"])
        print(f"{way}: x {ratio:.2f} of DCP's own folder (target of step: 1.3)")


if __name__ == "__main__":
    main()
