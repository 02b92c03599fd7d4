"""Programs on several processes that save and read arrays.

    python arrays_on_processes.py INDEX COUNT PORT SCENARIO ...

SCENARIO is a function of this file, which takes the other arguments.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import shutil
import sys
import time
import warnings
from typing import Any, cast

import jax
import numpy as np
import tensorstore as ts
import torch
import torchax
from etils import epath
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import Mesh
from processes_program import (
    INDEX,
    MESH,
    P,
    Training,
    init,
    patch,
    report,
    rule,
    shards,
    spread,
)
from support.described import Described, Tokenizer
from support.models import Counter
from support.strategies import random_bits

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, errors, policies
from torchax_ckpt.devices.device_memory import DeviceMemory
from torchax_ckpt.devices.device_sizes import bytes_on_devices
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.snapshot import snapshotter
from torchax_ckpt.snapshot.snapshotter import Snapshotter
from torchax_ckpt.snapshot.stacking import execute, needed_to_execute
from torchax_ckpt.storage.arrays import read_arrays, tensorstore_context
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import bucket, medium
from torchax_ckpt.stored.stored_step import StoredStep

# A row of each process.
ROWS = Mesh(np.array(jax.devices()).reshape(2, -1), ("replica", "fsdp"))
PATIENT = CheckpointOptions(process_timeout_secs=60)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def differing_replicas(directory: str) -> None:
    """Saves an array whose replicas differ from process to process."""
    host = np.arange(4096, dtype=np.float32).reshape(64, 64)
    whole = spread(host, None)
    pieces = [  # what a cosmic ray, or a collective without an order, leaves of one that was alike
        jax.device_put(host + (device.process_index == 1), device) for device in jax.local_devices()
    ]
    array = jax.make_array_from_single_device_arrays(host.shape, whole.sharding, pieces)
    options = CheckpointOptions(read_back=True, process_timeout_secs=60)
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        ckpt.save(1, state={"w": array}, force=True)
        ckpt.wait_until_finished()
        ckpt.verify(1)
        report(steps=ckpt.all_steps())


def sizes() -> None:
    """Compares the memory that copies take with the memory that was predicted."""
    ones = np.ones((8, 1024), np.float32)
    leaves = {name: spread(ones) for name in ("layers.0", "layers.1", "other")}
    plan = Plan({"layers.*": ("layers.0", "layers.1")}, frozenset())
    predicted = needed_to_execute(plan, leaves, copy=True).devices
    found = bytes_on_devices(execute(plan, leaves, copy=True).values())
    shard_bytes = ones.nbytes // MESH.size
    report(
        devices=len(found),
        shards=[num_bytes / shard_bytes for num_bytes in found.values()],
        is_as_predicted=found == predicted,
    )


def damaged_records(directory: str, phase: str) -> None:
    """Meets damaged records of steps."""

    def state(step: int) -> dict[str, Any]:
        return {"w": spread(np.full((8, 4), step, np.float32))}

    keep = policies.LatestN(2) if phase == "prune" else policies.PreserveAll()
    ckpt = TorchaxCheckpointer(directory, preservation_policy=keep)
    if phase in ("save", "prune"):
        for step in (1, 2) if phase == "save" else (3, 4):
            ckpt.save(step, state=state(step), force=True)
            ckpt.wait_until_finished()
        report(steps=ckpt.all_steps())
    else:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = ckpt.load(None, state(0))
            except errors.CorruptCheckpointError as error:
                report(refused="_CHECKPOINT_METADATA" in str(error))
            else:
                same = shards(found["w"]) == shards(state(1)["w"])
                said = any("_CHECKPOINT_METADATA" in str(w.message) for w in caught)
                report(same=same, said=said, steps=ckpt.all_steps())
    ckpt.close()


def bytes_of_restore(directory: str) -> None:
    """Reports how many bytes each process reads of a step, without and with one that reads for all.

    Each process is a slice that has all of the state. Reports also what each process wrote.
    """
    signs = spread(noise(4, 4), mesh=ROWS)  # zeros of both signs, and NaNs, in every width
    signs = jax.numpy.where(signs > 0, -0.0, jax.numpy.where(signs < -1, jax.numpy.nan, signs))
    dtypes = ("float32", "bfloat16", "float8_e4m3fn", "int8", "bool")
    state = {"w": spread(noise(256, 256), mesh=ROWS)}
    state |= {"odd": spread(noise(3), None, mesh=ROWS), "here": jax.numpy.arange(5.0)}
    state |= {dtype: signs.astype(dtype) for dtype in dtypes}
    saving = CheckpointOptions(read_back=True, process_timeout_secs=60)
    with TorchaxCheckpointer(directory, options=saving) as ckpt:
        ckpt.save(1, state=state, force=True)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    read: list[int] = []
    arrival = read_arrays.Arrival

    def counted(committed: Any, target: Any, piece: Any, store: Any, *pace: Any) -> Any:
        read.append(piece.nbytes)
        return arrival(committed, target, piece, store, *pace)

    patch(read_arrays, "Arrival", counted)
    for each in (CheckpointOptions(), CheckpointOptions(single_replica_restore=True)):
        read.clear()
        with TorchaxCheckpointer(directory, options=each) as ckpt:
            found = ckpt.load(1, abstract)
        for name, array in state.items():
            assert found[name].sharding == array.sharding
            assert shards(found[name]) == shards(array), name
        report(read=sum(read))
    folders = [pathlib.Path(directory, "1", "state", f"ocdbt.process_{i}", "d") for i in (0, 1)]
    report(written=[sum(f.stat().st_size for f in folder.iterdir()) for folder in folders])


def slow_reads(directory: str) -> None:
    """Reads from a bucket whose connections are slow."""
    bucket._TENSORSTORE["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"] = "1"
    state = {"w": spread(noise(256, 256))}
    for run in ("never", "once"):
        with TorchaxCheckpointer(f"{directory}/{run}") as ckpt:
            ckpt.save(1, state=state, force=True)
        options = CheckpointOptions(process_timeout_secs=6 if run == "never" else 60)
        began = time.monotonic()
        try:
            found = TorchaxCheckpointer(f"{directory}/{run}", options=options).load(1, state)["w"]
        except errors.CheckpointError as error:
            report(error=str(error), kind=type(error).__name__)
        else:
            same = shards(found) == shards(state["w"])
            report(same=same, secs=time.monotonic() - began)
    if INDEX == 0:
        shared = epath.Path(f"{directory}/shared")
        store = medium.of(shared).kvstore(shared)
        opened = ts.KvStore.open(store, context=tensorstore_context.reading_context()).result()
        began = time.monotonic()
        reads = [opened.read(str(i)) for i in range(32)]
        report(read=sum(len(r.result().value) for r in reads), secs=time.monotonic() - began)


def two_tiers(directory: str, mode: str, layout: str) -> None:
    """Saves a state to two tiers, and compares what is loaded with it."""

    def on(spec: P, *shape: int, dtype: Any = np.float32, kind: str = "device") -> jax.Array:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        host = np.arange(size).astype(np.uint8).view(dtype).reshape(shape)
        return spread(host, *(tuple(spec) or (None,)), mesh=ROWS, kind=kind)

    state: dict[str, Any] = {
        **{f"layers.{i}.w": on(P("fsdp"), 8, 6 + 2 * (i > 2)) for i in range(5)},
        **{f"norms.{i}": on(P(), 10) for i in range(3)},
        "both": on(P(("fsdp", "replica"), None), 16, 3),
        "columns": on(P(None, "fsdp"), 3, 12, dtype="bfloat16"),
        "whole": on(P(), 7, 5),
        "large": on(P("replica"), 512, 1200),
        "scalar": on(P(), 1).reshape(()),
        "pinned": on(P(), 8, 3, kind="pinned_host"),
        "here": jax.device_put(np.arange(6.0, dtype=np.float32), jax.local_devices()[-1]),
        "host": np.arange(5),
    }
    options = CheckpointOptions(
        snapshot=cast(Any, mode), layout=cast(Any, layout), process_timeout_secs=60
    )
    local = LocalTier(f"{directory}/local-{INDEX}")
    with TorchaxCheckpointer(f"{directory}/durable", options=options, local=local) as ckpt:
        ckpt.save(1, state=state)
        ckpt.wait_until_finished()
        loaded = {tier: ckpt.load(1, state, tier=cast(Any, tier)) for tier in ("durable", "local")}
        ckpt.verify(1)
    different = [
        f"{tier}/{name}"
        for tier, leaves in loaded.items()
        for name, array in state.items()
        if shards(leaves[name]) != shards(array)
    ]
    report(different=different)


def moved_local_steps(directory: str, ramdisks: str, places: str) -> None:
    """Four hosts restore local steps that were moved between them, in every dtype and sharding.

    PLACES is JSON: lists that say whose local step each host finds; null is none.
    """
    # A host is one place of replica and fsdp, and has all of tp.
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("replica", "fsdp", "tp"))
    dtypes = ["float32", "bfloat16", "complex64", "bool", "int8", "int4", "uint32"]
    dtypes += ["float8_e4m3fn", "float8_e5m2"]
    specs = [("fsdp",), ("tp", "fsdp"), (None, "tp"), (None,), (("fsdp", "tp"),)]
    leaves: dict[str, tuple[np.ndarray, Any]] = {
        f"{dtype} {i}": (random_bits(dtype, (8, 8), i), spec)
        for dtype, (i, spec) in itertools.product(dtypes, enumerate(specs))
    }
    leaves["scalar"] = np.asarray(np.float32(-0.0)), ()
    leaves["empty"] = np.zeros((0, 4), np.float32), (None,)
    turned: dict[str, Any] = {
        "float32 0": (None, ("tp", "fsdp")),
        "uint32 1": ("replica",),
        "bfloat16 1": ("fsdp", "tp"),
        "float8_e4m3fn 0": (None,),
        "float8_e5m2 4": ("replica",),
    }

    def placed(specs: dict[str, Any]) -> dict[str, jax.Array]:
        return {
            name: spread(host, *specs.get(name, spec), mesh=mesh)
            for name, (host, spec) in leaves.items()
        }

    def opened(mine: pathlib.Path) -> TorchaxCheckpointer:
        every = policies.FixedIntervalPolicy(1)
        local, never = LocalTier(mine, save_decision_policy=every), policies.SpecificStepsPolicy(())
        return TorchaxCheckpointer(directory, save_decision_policy=never, local=local)

    counter = Counter()
    counter.count = INDEX
    with opened(pathlib.Path(ramdisks, str(INDEX))) as ckpt:
        ckpt.attach(stateful={"counter": counter})
        ckpt.save(1, state=placed({}))
    sync_global_devices("saved")
    wanted = placed(turned)
    for number, hosts in enumerate(json.loads(places)):
        mine = pathlib.Path(ramdisks, f"{number}-{INDEX}")
        if hosts[INDEX] is not None:
            shutil.copytree(pathlib.Path(ramdisks, str(hosts[INDEX])), mine)
        sync_global_devices(f"moved {number}")
        counter.count = -1
        with opened(mine) as ckpt:
            try:
                start = ckpt.attach(stateful={"counter": counter})
                found = ckpt.load(start, wanted)
            except Exception as error:
                report(hosts=hosts, error=type(error).__name__)
                continue
        refusal = ""
        if None in hosts:
            with opened(mine) as ckpt:
                try:
                    ckpt.attach(torch.nn.Linear(2, 2, device="meta"), stateful={"counter": counter})
                except errors.MismatchError as error:
                    refusal = str(error)
        wrong = [
            name
            for name, array in found.items()
            if array.sharding != wanted[name].sharding
            or array.dtype != wanted[name].dtype
            or shards(array) != shards(wanted[name])
        ]
        report(hosts=hosts, start=start, own=counter.count, wrong=wrong, refusal=refusal)


def full_devices(directory: str, mode: str, host_bytes: str, fulls: str) -> None:
    """Saves from snapshots of a mode, with so many bytes on the host; some devices become full.

    FULLS is JSON: for each step the process whose devices are full, or null.
    """
    limit: dict[str, int] = {"bytes_in_use": 0}
    patch(snapshotter, "stacks_on_host", lambda arrays: False)
    keep = policies.PreserveAll()
    ckpt = TorchaxCheckpointer(directory, options=PATIENT, preservation_policy=keep)
    memory = DeviceMemory(lambda device: limit, lambda: int(host_bytes))
    ckpt._run.snapshotter = Snapshotter(cast(Any, mode), "auto", memory)
    failed = {}
    for step, full in enumerate(json.loads(fulls), 1):
        state = {
            f"{kind}.{i}.w": spread(np.full((8, 1024), step * i, "f4"), axis)
            for kind, axis in (("layers", "fsdp"), ("copies", None))
            for i in range(5)
        }
        limit["bytes_limit"] = 0 if full == INDEX else 1 << 40
        ckpt.save(step, state=state, force=True)
        try:
            ckpt.wait_until_finished()
        except errors.SaveError as error:
            failed[step] = str(error)
        abstract = {
            n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for n, a in state.items()
        }
        jax.tree.map(lambda x: x.delete(), state)  # as a step that donates
    ckpt.close()
    loaded = [array for step in ckpt.all_steps() for array in ckpt.load(step, abstract).values()]
    means = [[float(np.asarray(s.data).mean()) for s in a.addressable_shards] for a in loaded]
    report(failed=failed, steps=ckpt.all_steps(), means=means)


def events(directory: str) -> None:
    """Saves two steps and reports the events that this process was told of."""
    told: list[str] = []
    with TorchaxCheckpointer(directory, on_event=lambda event: told.append(event.name)) as ckpt:
        training = Training(0)
        training.attach(ckpt)
        for step in (1, 2):
            training.step()
            ckpt.save(step, force=True)
    report(told=told, durable=ckpt.stats().num_durable)


def assets(directory: str, local: str) -> None:
    """Saves a model with a config, of which each process knows something else."""
    place = f"{local}/host-{INDEX}"
    tokenizer = Tokenizer({"tokenizer.json": "{}"}) if INDEX == 0 else None
    model = Described(hidden_size=INDEX).to("meta")
    torchax.enable_globally()
    options, tier = CheckpointOptions(read_back=True), LocalTier(place)
    with TorchaxCheckpointer(directory, local=tier, options=options) as ckpt:
        ckpt.attach(model, tokenizer=tokenizer, shardings=rule, init=init)
        ckpt.save(1)
        ckpt.wait_until_finished()
    paths = {"durable": directory, "local": place}
    steps = {
        name: RunDirectory(path, read_only=True).candidates(1)[-1] for name, path in paths.items()
    }
    report(**{name: StoredStep(s, allow_part=True).read_assets() for name, s in steps.items()})


if __name__ == "__main__":
    globals()[sys.argv[4]](*sys.argv[5:])
