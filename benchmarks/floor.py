"""Compares saves with the least that a machine needs for the same: stack, fetch, digest, write.

    python benchmarks/floor.py [--rounds 3] [--saves 5] [--directory /dev/shm]

``Floor`` stacks the same leaves where the library does, fetches and digests them,
and writes them with TensorStore so that Orbax could merge and read them. It has no manifest, no
lease, no events and no policies. Each round runs each peer in a new process, one after the other.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import peers
import tensorstore as ts
import xxhash

from torchax_ckpt.devices.host_array import HostArray
from torchax_ckpt.devices.sharding import LateParts, stack
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.snapshot.planner import plan_snapshot
from torchax_ckpt.snapshot.snapshotter import stacks_on_host
from torchax_ckpt.snapshot.stacking import execute
from torchax_ckpt.storage.arrays import chunking

_OCDBT = {
    "driver": "ocdbt",
    "config": {
        "max_inline_value_bytes": 1024,
        "max_decoded_node_bytes": 100_000_000,
        "manifest_kind": "single",
    },
    "assume_config": True,
    "cache_pool": "cache_pool#ocdbt",
}
_CONTEXT = {
    "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000},
    "file_io_concurrency": {"limit": 128},
}
_TIMES = {"deep": 1.3, "middle": 1.15, "large": 1.1}  # targets
_ADDED, _ADDED_OF_BARE = 2.0, 1 / 150


class Floor(peers.Peer):
    """Writes steps in the background; with ``keep``, each replaces the one before."""

    def __init__(self, directory: Path, module: Any, optimizer: Any, flat: Any, keep: Any) -> None:
        self._directory, self._flat, self._keep = directory, flat, keep
        self._threads = ThreadPoolExecutor(1)
        self._saving: Future[None] | None = None
        self._plan: Plan | None = None
        # New memory would take longer than stacking.
        self._stacks: dict[tuple[str, Any], np.ndarray] = {}

    def save(self, step: int) -> None:
        self._saving = self._threads.submit(self._write, step, self._flat())

    def is_saving(self) -> bool:
        return self._saving is not None and not self._saving.done()

    def wait(self) -> None:
        if self._saving is not None:
            self._saving.result()

    def close(self) -> None:
        self.wait()

    def _write(self, step: int, leaves: dict[str, Any]) -> None:
        plan = self._plan = self._plan or plan_snapshot([*leaves], [*leaves.values()], "auto").plan
        on_host = stacks_on_host([*leaves.values()])
        arrays = execute(plan, leaves, copy=False, on_host=on_host)
        folder, context = self._directory / "writing", ts.Context(_CONTEXT)
        writing = ts.Transaction(atomic=True)
        part, opened, copies, digests = folder / "ocdbt.process_0", [], [], {}
        for name, array in arrays.items():
            spec = {"driver": "zarr", "kvstore": _kvstore(part, name), "metadata": _zarr(array)}
            opened.append(ts.open(spec, create=True, context=context, transaction=writing))
        parts = [[*self._parts(name, array)] for name, array in arrays.items()]
        for store, shards in zip(opened, parts, strict=True):
            for index, host in shards:
                target = store.result()[index]
                copies.append(target.write(host, can_reference_source_data_indefinitely=True).copy)
        for copy in copies:
            copy.result()
        commit = writing.commit_async()
        for (name, _), shards in zip(arrays.items(), parts, strict=True):
            blocks: list[Any] = [h if name in plan.stacks else [h] for _, h in shards]
            digests[name] = [xxhash.xxh3_64_intdigest(row) for rows in blocks for row in rows]
        commit.result()
        source, whole = (ts.KvStore.open(_kvstore(at), context=context) for at in (part, folder))
        merge = ts.Transaction(atomic=True)
        source.result().experimental_copy_range_to(whole.result().with_transaction(merge)).result()
        merge.commit_async().result()
        (folder / "_METADATA").write_text(json.dumps(digests))
        folder.rename(self._directory / str(step))
        if self._keep:
            shutil.rmtree(self._directory / str(step - 1), ignore_errors=True)

    def _parts(self, name: str, array: Any) -> Iterator[tuple[Any, np.ndarray]]:
        if isinstance(array, np.ndarray):
            yield (), array
        elif isinstance(array, HostArray):
            assert isinstance(array.parts, LateParts)
            for offset in array.parts:
                rows = array.parts.members(offset)
                held = self._stacks.get((name, offset))
                part = self._stacks[name, offset] = stack(rows, held)
                yield chunking.region(offset, part.shape), part
        else:
            for shard in array.addressable_shards:
                if shard.replica_id == 0:
                    yield shard.index, np.asarray(shard.data)


def _kvstore(folder: Path, name: str | None = None) -> dict[str, Any]:
    base: dict[str, Any] = {"driver": "file", "path": f"{folder}/"}
    unlocked = base | {"file_io_locking": {"mode": "non_atomic"}}
    opened = _OCDBT | {"base": unlocked, "manifest": base}
    return opened | ({"path": f"{name}/", "target_data_file_size": 64 << 20} if name else {})


def _zarr(array: Any) -> dict[str, Any]:
    is_on_host = isinstance(array, np.ndarray)
    chunks = array.shape if is_on_host else array.sharding.shard_shape(array.shape)
    how: dict[str, Any] = {"compressor": None, "fill_value": None, "order": "C", "filters": None}
    return {
        "shape": array.shape,
        "chunks": chunks,
        "dtype": array.dtype.str,
        "zarr_format": 2,
        **how,
    }


def measured(what: str, state: str, peer: str, directory: str, *args: Any) -> dict[str, Any]:
    """Returns what ``measure.py`` prints, run in a process of its own."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        command = [what, state, peer, f"{folder}/run", *map(str, args)]
        program = Path(__file__).with_name("measure.py")
        found = subprocess.run(
            [sys.executable, program, *command], check=True, stdout=subprocess.PIPE, text=True
        )
    return json.loads(found.stdout.rpartition("RESULT ")[2])


def cells(own: list[float], floor: list[float], target: float) -> str:
    """Returns a cell: both medians with their range, and the ratio of the medians."""
    of = statistics.median(own) / statistics.median(floor)
    if of <= 0:  # what is added is a difference, of two loops
        raise SystemExit(f"too noisy to say: {own} and {floor}")
    texts = [
        f"{statistics.median(v) * 1e3:.0f} ({min(v) * 1e3:.0f} - {max(v) * 1e3:.0f})"
        for v in (own, floor)
    ]
    return f"{texts[0]} | {texts[1]} | x {of:.3g} | x {target:.3g} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=5, help="in each process, after a warm-up")
    parser.add_argument("--steps", type=int, default=60, help="saves of a loop that waits 50 ms")
    parser.add_argument("--directory", default="/dev/shm")
    args = parser.parse_args()
    both = ("floor", "torchax_ckpt")
    print("| state | what | saves, ms | floor, ms | ratio | target |\n|---|---|---|---|---|---|")
    for state, target in _TIMES.items():
        found: dict[tuple[str, str], list[float]] = {}
        for _ in range(args.rounds):
            for peer in both:
                one = measured("save", state, peer, args.directory, args.saves)
                for what in ("processor", "durable"):
                    found.setdefault((what, peer), []).extend(one[what])
        for what in ("processor", "durable"):
            row = cells(found[what, "torchax_ckpt"], found[what, "floor"], target)
            print(f"| {state} | {what} | {row}", flush=True)
    without_saves = 0.0
    added: dict[str, list[float]] = {peer: [] for peer in (*both, "orbax_v1")}
    for _ in range(args.rounds):
        for peer in ("none", *added):
            count = args.steps if peer != "orbax_v1" else max(3, args.steps // 10)
            one = measured(
                "loop", "deep", peer, args.directory, count, "--device-secs", 0.05, "--max-secs", 90
            )
            if peer == "none":
                without_saves = statistics.mean(one["step"])
            else:
                longer = sum(one["step"]) - len(one["step"]) * without_saves
                added[peer].append(longer / len(one["intervals"]))  # fails if there are none
    row = cells(added["torchax_ckpt"], added["floor"], _ADDED)
    print(f"| deep | added to a loop that waits 50 ms for its device, per save | {row}")
    row = cells(added["torchax_ckpt"], added["orbax_v1"], _ADDED_OF_BARE)
    print(f"| deep | the same, beside bare Orbax v1 | {row}")


if __name__ == "__main__":
    main()
