"""Measures saves and restores by the number of processes, leaves and bytes.

    python benchmarks/processes.py [--counts 1,2,4] [--repeats 5]

Starts 1, 2 and 4 processes on this machine, with two forced CPU devices each. They save and restore
float32 leaves that are sharded over all devices, or replicated over slices. Prints tables. All
processes share the cores and the disk, so the tables show the cost of coordination and not the gain
from more hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Number of leaves, total MiB.
STATES = [(16, 16), (256, 16), (2048, 16), (16, 256)]
SLICES = (16, 64)
# Timeout for hanging processes. A gibibyte at the lowest rate of replica_restore.py takes ten
# minutes.
MAX_SECS = 3600


def main() -> None:
    """Takes the measurements and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", default="1,2,4")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    counts = [int(count) for count in args.counts.split(",")]
    found = {count: measured(__file__, count, str(args.repeats)) for count in counts}
    print("| leaves | MiB | processes | blocking | durable | restore | declined |")
    print("|---|---|---|---|---|---|---|")
    for i, (leaves, mib) in enumerate(STATES):
        for count in counts:
            # The slowest process counts, because the others wait for it.
            row = {
                key: max(process["states"][i][key] for process in found[count])
                for key in ("blocking", "durable", "restore")
            }
            declined = max(process["declined"] for process in found[count])
            print(
                f"| {leaves:,} | {mib} | {count} | {row['blocking'] * 1e3:.1f} ms | "
                f"{row['durable']:.2f} s | {row['restore']:.2f} s | {declined * 1e6:.1f} us |"
            )
    print("\nBytes that each process wrote, with", SLICES[1], "MiB replicated over two slices:\n")
    for count in [count for count in counts if count > 1]:
        written = ", ".join(f"{n / 2**20:.1f} MiB" for n in found[count][0]["written"])
        each, one = (max(p["slices"][key] for p in found[count]) for key in ("False", "True"))
        print(
            f"- {count} processes: {written}; restore: {each:.2f} s if each slice reads, "
            f"{one:.2f} s if one replica reads for all"
        )


def measured(program: str, count: int, *args: str) -> list[Any]:
    """Runs ``count`` processes of a program; returns the measurements of each."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as root:
        processes = [
            subprocess.Popen(
                [sys.executable, program, "child", str(i), str(count), str(port), root, *args],
                env={
                    **os.environ,
                    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
                    "JAX_PLATFORMS": "cpu",
                    "TF_CPP_MIN_LOG_LEVEL": "3",
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for i in range(count)
        ]
        try:
            outputs = [process.communicate(timeout=MAX_SECS)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        if codes := [process.returncode for process in processes if process.returncode]:
            sys.exit(f"{program}: a process exited with {codes[0]}; its error is above")
        return [json.loads(output.splitlines()[-1]) for output in outputs]


def meet(index: int, count: int, port: str) -> None:
    """Joins the distributed program, on this machine's loopback address only."""
    import jax

    place = f"127.0.0.1:{port}"
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(place, count, index, coordinator_bind_address=place)


def child(index: int, count: int, port: str, root: Path, repeats: int) -> None:
    """Takes the measurements of one process and prints them as JSON."""
    if count > 1:
        meet(index, count, port)
    import jax
    import numpy as np
    import torchax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies

    torchax.enable_globally()

    def spread(leaves: int, mib: int, mesh: Mesh) -> dict[str, jax.Array]:
        rows = (mib << 20) // leaves // 1024
        sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
        host = np.random.default_rng(0).standard_normal((rows, 256)).astype(np.float32)
        return {
            f"layers.{i}.w": jax.make_array_from_callback(host.shape, sharding, lambda x: host[x])
            for i in range(leaves)
        }

    def one(leaves: int, mib: int, mesh: Mesh, name: str) -> tuple[dict[str, float], float]:
        state = spread(leaves, mib, mesh)
        blocking, durable, restore, declined = [], [], [], []
        never = policies.SpecificStepsPolicy(set())
        options = CheckpointOptions(snapshot="reference")
        with TorchaxCheckpointer(root / name, options=options, save_decision_policy=never) as ckpt:
            for step in range(0, 10_000 * (repeats + 1), 10_000):
                began = time.perf_counter()
                ckpt.save(step, state=state, force=True)
                blocking.append(time.perf_counter() - began)
                ckpt.wait_until_finished()
                durable.append(time.perf_counter() - began)
                began = time.perf_counter()
                jax.block_until_ready(ckpt.load(step, state))
                restore.append(time.perf_counter() - began)
                for declining in range(step + 1, step + 400):
                    began = time.perf_counter()
                    ckpt.save(declining, state=state)
                    declined.append(time.perf_counter() - began)
        return {
            "blocking": statistics.median(blocking[1:]),
            "durable": statistics.median(durable[1:]),
            "restore": statistics.median(restore[1:]),
        }, statistics.median(declined)

    devices = np.array(jax.devices())
    rows = [one(*state, Mesh(devices, ("fsdp",)), f"{state}") for state in STATES]
    one(*SLICES, Mesh(devices.reshape(2, -1), ("slice", "fsdp")), "slices")
    slices = spread(*SLICES, Mesh(devices.reshape(2, -1), ("slice", "fsdp")))
    received = {}
    for single in (False, True):
        options = CheckpointOptions(single_replica_restore=single)
        with TorchaxCheckpointer(root / "slices", options=options) as ckpt:
            took = []
            for _ in range(repeats + 1):
                began = time.perf_counter()
                jax.block_until_ready(ckpt.load(None, slices))
                took.append(time.perf_counter() - began)
            received[str(single)] = statistics.median(took[1:])
    written = [
        sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        for folder in sorted((root / "slices").glob("*/state/ocdbt.process_*"))[-count:]
    ]
    print(
        json.dumps(
            {
                "states": [row for row, _ in rows],
                "declined": statistics.median(declined for _, declined in rows),
                "written": written,
                "slices": received,
            }
        )
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]), int(sys.argv[6]))
    else:
        main()
