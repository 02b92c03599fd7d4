"""Takes one measurement and prints it as one JSON object; run.py starts it once for each.

    python measure.py save|restore|loop|modes|digests|declined|machine STATE PEER DIRECTORY REPEATS

STATE is a name of ``states.py``, such as ``deep``, or with a suffix ``deep-donated`` or
``deep-functional``. Runs on four forced CPU devices, or on the platform that JAX_PLATFORMS names.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")

import argparse
import datetime
import importlib.metadata
import inspect
import itertools
import json
import logging
import platform
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy
import torchax

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
torchax.enable_globally()

import states  # noqa: E402 - after the devices are forced
from floor import Floor  # noqa: E402
from peers import PEERS, Peer  # noqa: E402

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer  # noqa: E402
from torchax_ckpt.policies import LatestN  # noqa: E402


def clock() -> float:
    return time.perf_counter()


def save(state: str, peer: str, directory: Path, repeats: int) -> dict[str, Any]:
    """Measures the blocking and durable time of each save, the first separately.

    A step that donates the state runs while the save is in flight. After each save, the medium is
    measured: the same number of bytes is written to one file, fsynced, and read back. The speed of
    a disk and of a virtual machine's memory changes from minute to minute, so only such pairs are
    compared. Old steps are deleted outside the measured time.
    """
    training = states.training(state)
    saver = _peer(peer, directory, training, keep=None)
    leaves = jax.tree.leaves(training.arrays())
    num_leaves, size = len(leaves), sum(v.nbytes for v in leaves)
    del leaves
    blocking: list[float] = []
    durable: list[float] = []
    processor: list[float] = []
    write: list[float] = []
    read: list[float] = []
    for step in range(1, repeats + 2):
        began, began_processor = clock(), time.process_time()
        saver.save(step)
        blocking.append(clock() - began)
        if training.donates:
            training.update()
        saver.wait()
        durable.append(clock() - began)
        processor.append(time.process_time() - began_processor)
        for seconds, known in zip(
            medium(directory.parent / "raw", size), (write, read), strict=True
        ):
            known.append(seconds)
        shutil.rmtree(directory / str(step - 1), ignore_errors=True)
    saver.close()
    return {
        "leaves": num_leaves,
        "bytes": size,
        "first": blocking[0],
        "blocking": blocking[1:],
        "durable": durable[1:],
        "processor": processor[1:],
        "write": write[1:],
        "read": read[1:],
    }


def _peer(name: str, directory: Path, training: states.Training, keep: int | None) -> Peer:
    known = PEERS | {"floor": Floor}
    return known[name](directory, training.module, training.optimizer, training.arrays, keep=keep)


def medium(path: Path, size: int) -> tuple[float, float]:
    """Returns the seconds to write ``size`` bytes to a file and fsync it, and to read them."""
    block = bytearray(os.urandom(16 << 20))
    began = clock()
    with open(path, "wb", buffering=0) as file:
        left = size
        while left:
            left -= file.write(memoryview(block)[: min(left, len(block))])
        os.fsync(file.fileno())
    written = clock() - began
    began = clock()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(block):
            pass
    read = clock() - began
    path.unlink()
    return written, read


def modes(state: str, peer: str, directory: Path, repeats: int) -> dict[str, Any]:
    """Measures this library's blocking time by snapshot mode, with idle and busy devices.

    Busy devices have a queue of work that lasts longer than the save.
    """
    module, optimizer = states.build(state)
    work = jax.numpy.ones((768, 768))
    compute = jax.jit(lambda w: jax.lax.fori_loop(0, 60, lambda _, x: x @ w * 1e-3, w))
    jax.block_until_ready(compute(work))
    result: dict[str, list[float]] = {}
    steps = itertools.count()
    for mode in ("reference", "copy"):
        with TorchaxCheckpointer(
            directory / mode,
            preservation_policy=LatestN(1),
            options=CheckpointOptions(snapshot=mode),
        ) as ckpt:
            ckpt.attach(module, optimizer)
            for busy in ("idle", "busy"):
                blocking = []
                for _ in range(repeats + 1):
                    queued = [compute(work) for _ in range(4)] if busy == "busy" else []
                    began = clock()
                    ckpt.save(next(steps), force=True)
                    blocking.append(clock() - began)
                    jax.block_until_ready(queued)
                    ckpt.wait_until_finished()
                result[f"{mode}, {busy}"] = blocking[1:]
    return result


def digests(state: str, peer: str, directory: Path, repeats: int) -> dict[str, Any]:
    """Measures saves with and without digests, and restores with and without comparing them.

    They alternate in one process, and the order within the pairs of saves alternates too, because
    the disk finishes the writes of a save during the next one.
    """
    from torchax_ckpt.storage.arrays import block_digests

    of_blocks = block_digests.of_blocks

    def none(host: Any, block: tuple[int, ...]) -> Any:
        return numpy.zeros(block_digests.grid_shape(host.shape, block), numpy.uint64)

    module, optimizer = states.build(state)
    result: dict[str, list[float]] = {"taken": [], "not taken": [], "compared": [], "trusted": []}
    with TorchaxCheckpointer(directory, preservation_policy=LatestN(1)) as ckpt:
        ckpt.attach(module, optimizer)
        ways = [("not taken", none), ("taken", of_blocks)]
        for step in range(2 * repeats + 2):
            name, block_digests.of_blocks = ways[(step + step // 2) % 2]
            began = clock()
            ckpt.save(step, force=True)
            ckpt.wait_until_finished()
            result[name].append(clock() - began)
    for _ in range(repeats + 1):
        for name, options in (
            ("trusted", CheckpointOptions(verify="never", read_only=True)),
            ("compared", CheckpointOptions(verify="restore", read_only=True)),
        ):
            with TorchaxCheckpointer(directory, options=options) as ckpt:
                began = clock()
                ckpt.attach(module, optimizer)
                jax.block_until_ready(list(states.arrays_of(module, optimizer).values()))
                result[name].append(clock() - began)
    return {name: values[1:] for name, values in result.items()}


def restore(state: str, peer: str, directory: Path, repeats: int) -> dict[str, Any]:
    """Measures the first restore of a process, into a new module with a stepped optimizer.

    The files are in the page cache, because they were written a moment before.
    """
    training = states.training(state, seed=1)
    jax.block_until_ready(training.arrays())
    began = clock()
    restorer = _peer(peer, directory, training, keep=None)
    jax.block_until_ready(restorer.restore())
    return {"restore": [clock() - began]}


def loop(
    state: str, peer: str, directory: Path, repeats: int, *,
    max_secs: float, compute_secs: float | None, device_secs: float | None,
) -> dict[str, Any]:  # fmt: skip
    """Measures a training loop under continuous saving: durable intervals in steps, step times.

    A step updates every array in one jitted call and then computes for a while, as a model would,
    or waits for a device that computes elsewhere. The result has the processor time of the loop's
    process during the steps of ``step``, in seconds.

    Args:
      state: the name of the state to train.
      peer: the peer that saves it; "none" saves nothing.
      directory: the directory of the checkpoints.
      repeats: the number of intervals to measure; with "none", of steps.
      max_secs: no interval begins after this time.
      compute_secs: how long a step computes in addition to the update; None for four products of
        [768, 768] matrices, some 50 ms on two CPU cores.
      device_secs: how long the host waits for the device in each step instead of computing; None
        for a device that shares the cores with the host.
    """
    training = states.training(state)
    size = sum(v.nbytes for v in jax.tree.leaves(training.arrays()))
    work = jax.numpy.ones((768, 768))
    compute = jax.jit(lambda w, n: jax.lax.fori_loop(0, n, lambda _, x: x @ w * 1e-3, w))
    num_products = 4 if compute_secs is None else _products_in(compute_secs, compute, work)

    def step() -> None:
        arrays = training.update()
        if device_secs is not None:
            time.sleep(device_secs)
            jax.block_until_ready(arrays)
        else:
            jax.block_until_ready((arrays, compute(work, num_products)))

    for _ in range(3):
        step()
    times: list[float] = []
    blocking: list[float] = []
    intervals: list[int] = []
    processor: list[float] = [0.0]  # at the end of each step
    if peer == "none":
        began_processor = time.process_time()
        for _ in range(repeats):
            began = clock()
            step()
            times.append(clock() - began)
            processor.append(time.process_time() - began_processor)
    else:
        saver = _peer(peer, directory, training, keep=1)
        for warm_up in (1, 2):  # After the first, the library knows whether the program donates.
            saver.save(warm_up)
            step()
            saver.wait()
        numbers = itertools.count(3)
        began_at: int | None = None
        until = clock() + max_secs
        began_processor = time.process_time()
        while len(intervals) < repeats and clock() < until:
            began = clock()
            step()
            if began_at is not None and not saver.is_saving():
                intervals.append(len(times) - began_at)
                began_at = None
            if began_at is None:
                began_at = len(times)
                saving = clock()
                saver.save(next(numbers))
                blocking.append(clock() - saving)
            times.append(clock() - began)
            processor.append(time.process_time() - began_processor)
        # The last save is not durable yet, so that only a part of its cost has been measured.
        if intervals and began_at is not None:
            del times[began_at:], processor[began_at + 1 :], blocking[-1]
        saver.wait()
        saver.close()
    return {
        "bytes": size,
        "step": times,
        "blocking": blocking,
        "intervals": intervals,
        "processor": processor[-1],
    }


def _products_in(secs: float, compute: Any, work: Any) -> int:
    """Returns the number of matrix products that take ``secs`` on this machine."""
    jax.block_until_ready(compute(work, 100))
    began = clock()
    jax.block_until_ready(compute(work, 100))
    return max(1, round(100 * secs / (clock() - began)))


def declined(state: str, peer: str, directory: Path, repeats: int) -> dict[str, Any]:
    """Measures a ``save`` that the policy declines, by policy and number of kept steps.

    The steps are not on the medium. The program replaces the list of the run's steps.
    """
    import copy
    import threading

    import numpy as np

    from torchax_ckpt import TorchaxCheckpointer, policies
    from torchax_ckpt.storage.directory.abandonment import Branches
    from torchax_ckpt.storage.directory.committed_step import CommittedStep
    from torchax_ckpt.storage.directory.run_directory import RunDirectory
    from torchax_ckpt.storage.writing import array_writer

    # Gives the policy a full history of saves, and of steps during saves and without them.
    optimal = policies.OptimalIntervalPolicy(mtbf_secs=1e9)
    for step in range(100):
        is_saving = step // 5 % 2 == 1
        optimal._times.completed(
            step - 100, float(step), is_saving=is_saving, newest_step=step // 10
        )
        optimal.observe_save(blocking_secs=1e6, durable_secs=2e6)
    go = threading.Event()
    write_arrays = array_writer.write_arrays

    def write_later(*args: Any, **settings: Any) -> Any:
        go.wait()
        return write_arrays(*args, **settings)

    array_writer.write_arrays = write_later
    tree = {"w": np.zeros(4)}
    results = {}
    for kept in (3, 10_000):
        now = time.time_ns()
        steps = [CommittedStep(s, directory / str(s), now - kept + s) for s in range(1, kept + 1)]
        branches = Branches(tuple(steps))
        RunDirectory.branches = lambda self, known=branches: known  # type: ignore
        for name, policy, is_saving in (
            ("fixed interval", policies.FixedIntervalPolicy(10**9), False),
            ("minimum interval", policies.ContinuousCheckpointingPolicy(
                minimum_interval_secs=1e9), False),
            ("optimal interval", copy.deepcopy(optimal), False),
            ("a save in flight", policies.ContinuousCheckpointingPolicy(), True),
        ):  # fmt: skip
            ckpt = TorchaxCheckpointer(directory, save_decision_policy=policy)
            if is_saving:
                go.clear()
                ckpt.save(kept + 1, state=tree, force=True)
            taken = []
            for step in range(kept + 2, kept + repeats + 2):
                began = clock()
                ckpt.save(step, state=tree)
                taken.append(clock() - began)
            taken.sort()
            results[f"{name}, {kept:,} steps kept"] = {
                "median": taken[repeats // 2],
                "90th percentile": taken[repeats * 9 // 10],
            }
            go.set()
            ckpt.close()
    return results


def machine(state: str, peer: str, directory: Path, repeats: int) -> dict[str, Any]:
    """Returns the date, the machine and the versions of a measurement."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    devices = jax.devices()
    is_cpu = devices[0].platform == "cpu"
    kind = "forced CPU" if is_cpu else devices[0].device_kind
    libraries = ("torch", "torchax", "jax", "orbax-checkpoint", "tensorstore")
    return {
        "date": datetime.date.today().isoformat(),
        "platform": devices[0].platform,
        "machine": f"{os.cpu_count()} CPU cores ({platform.machine()}), {memory / 2**30:.0f} GiB "
        f"memory, local disk, {len(devices)} {kind} devices{', no accelerator' if is_cpu else ''}",
        "python": platform.python_version(),
        **{library: importlib.metadata.version(library) for library in libraries},
    }


MEASUREMENTS = {f.__name__: f for f in (save, restore, loop, modes, digests, declined, machine)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=MEASUREMENTS)
    parser.add_argument("state")
    parser.add_argument("peer")
    parser.add_argument("directory", type=Path)
    parser.add_argument("repeats", type=int)
    parser.add_argument("--max-secs", type=float, default=600)
    parser.add_argument("--compute-secs", type=float)
    parser.add_argument("--device-secs", type=float)
    args = vars(parser.parse_args())
    measurement = MEASUREMENTS[args.pop("what")]
    wanted = inspect.signature(measurement).parameters
    result = measurement(**{name: value for name, value in args.items() if name in wanted})
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
