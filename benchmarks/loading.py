"""Measures how fast a folder of a model is loaded onto devices, and how much memory that takes.

    python benchmarks/loading.py [--megabytes 500] [--shard-megabytes 100] [--rounds 3]

Makes a folder of safetensors files with random bfloat16 weights of a small Llama, as ``torchax-ckpt
export --format hf`` does, and loads it in five ways, each in a process of its own:

- ``bytes``: reads the files, 4 MiB at a time, and keeps nothing;
- ``memory``: reads the files into new memory, 4 MiB each, and keeps it: the least that a load onto
  CPU devices can cost, because the system zeroes each new page, and maps it, when it is written;
- ``safetensors``: ``safetensors.torch.load_file`` of each file, every tensor copied;
- ``transformers``: ``from_pretrained``, every tensor copied;
- ``warm_start``: onto a model on the meta device, whose tensors are sharded over eight devices.

Prints the least and the median time of each way, the least time of the CPU (all threads), and the
largest memory. Imports, the making of the model and a
first small load, which compiles, are not counted. The devices are the CPU's memory, so the weights
themselves count once in the last four ways. The files come from the host's page cache.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS = ("bytes", "memory", "safetensors", "transformers", "warm_start")
_HIDDEN = 1024


def config(num_layers: int) -> Any:
    import transformers

    return transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=_HIDDEN,
        intermediate_size=4 * _HIDDEN,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )


def make(folder: Path, megabytes: float, shard_megabytes: float) -> None:
    """Writes a folder of about this size."""
    import torch
    import transformers

    layer_bytes = 2 * (12 * _HIDDEN**2 + 2.5 * _HIDDEN**2)
    num_layers = max(1, round(megabytes * 1e6 / layer_bytes))
    model = transformers.LlamaForCausalLM(config(num_layers)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=f"{shard_megabytes:g}MB")


def load(way: str, folder: Path) -> dict[str, float]:
    """Loads the folder in one way; returns seconds, and the bytes by which the peak grew."""
    files = sorted(folder.glob("*.safetensors"))
    act: Any
    if way == "bytes":

        def act() -> None:
            buffer = bytearray(4 << 20)
            for file in files:
                with open(file, "rb", buffering=0) as opened:
                    while opened.readinto(buffer):
                        pass

    elif way == "memory":

        def act() -> Any:
            kept = []
            for file in files:
                with open(file, "rb", buffering=0) as opened:
                    size = file.stat().st_size
                    while opened.tell() < size:
                        piece = mmap.mmap(-1, min(4 << 20, size - opened.tell()))
                        opened.readinto(piece)
                        kept.append(piece)
            return kept

    elif way == "safetensors":
        import safetensors.torch

        def act() -> Any:
            found = [safetensors.torch.load_file(file) for file in files]
            return [t.clone() for part in found for t in part.values()]

    elif way == "transformers":
        import transformers

        transformers.utils.logging.disable_progress_bar()
        assert transformers.LlamaForCausalLM, "imported at first use, which is not measured"

        def act() -> Any:
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
            return [p.clone() for p in loaded.parameters()]  # until then, only maps the files

    else:
        import jax
        import numpy as np
        import torch
        import torchax
        import transformers
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        from torchax_ckpt import warm_start

        mesh = Mesh(np.array(jax.devices()), ("fsdp",))

        def rule(name: str, abstract: Any) -> NamedSharding:
            is_divisible = abstract.shape and abstract.shape[0] % mesh.size == 0
            return NamedSharding(mesh, PartitionSpec("fsdp") if is_divisible else PartitionSpec())

        with torch.device("meta"):
            known = transformers.AutoConfig.from_pretrained(folder)
            model = transformers.LlamaForCausalLM(known).to(torch.bfloat16)
        torchax.enable_globally()
        warm_start(torch.nn.Linear(1, 1).to("jax"), _small(folder))

        def act() -> None:
            warm_start(model, folder, shardings=rule)
            jax.block_until_ready([p.jax() for p in model.parameters()])

    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _peak_bytes()
    began, cpu_began = time.perf_counter(), time.process_time()
    kept = act()
    secs, cpu_secs = time.perf_counter() - began, time.process_time() - cpu_began
    del kept
    return {"secs": secs, "cpu_secs": cpu_secs, "peak_bytes": _peak_bytes() - before}


def _peak_bytes() -> int:
    (line,) = (s for s in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in s)
    return int(line.split()[1]) * 1024


def _small(folder: Path) -> Path:
    import numpy as np
    import safetensors.numpy

    path = folder.parent / "small.safetensors"
    tensors = {"weight": np.ones((1, 1), np.float32), "bias": np.ones(1, np.float32)}
    safetensors.numpy.save_file(tensors, path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=500)
    parser.add_argument("--shard-megabytes", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(load(arguments.way, arguments.folder)))
        return
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top, "model")
        make(folder, arguments.megabytes, arguments.shard_megabytes)
        sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
        print(f"{len(sizes)} files, {sum(sizes) / 1e6:.0f} MB, largest {max(sizes) / 1e6:.0f} MB")
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(arguments.rounds):  # in turn, so that all meet the same noise
            for way in WAYS:
                command = [sys.executable, __file__, "--way", way, "--folder", str(folder)]
                said = subprocess.run(command, env=environment, check=True, capture_output=True)
                found[way].append(json.loads(said.stdout.splitlines()[-1]))
    least = {key: min(one[key] for one in found["bytes"]) for key in ("secs", "cpu_secs")}
    print(
        f"{'way':14}{'least s':>9}{'median s':>9}{'x bytes':>9}{'CPU s':>9}{'x bytes':>9}"
        f"{'peak MB':>9}"
    )
    for way, every in found.items():
        secs = min(one["secs"] for one in every)
        cpu_secs = min(one["cpu_secs"] for one in every)
        median = statistics.median(one["secs"] for one in every)
        peak = max(one["peak_bytes"] for one in every)
        print(
            f"{way:14}{secs:9.3f}{median:9.3f}{secs / least['secs']:9.1f}{cpu_secs:9.3f}"
            f"{cpu_secs / least['cpu_secs']:9.1f}{peak / 1e6:9.0f}"
        )


if __name__ == "__main__":
    main()
