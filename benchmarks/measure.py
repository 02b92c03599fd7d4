"""One measurement in a process of its own; prints one JSON object.

python measure.py save|restore|loop|raw STATE PEER DIRECTORY REPEATS
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")

import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import torchax

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
torchax.enable_globally()

import states  # noqa: E402 - after the devices are forced
from peers import PEERS  # noqa: E402


def clock() -> float:
    return time.perf_counter()


def save(state: str, peer: str, directory: Path, repeats: int) -> dict[str, Any]:
    """Blocking and durable time of each save; the first apart."""
    module, optimizer = states.build(state)
    saver = PEERS[peer](directory, module, optimizer, lambda: states.arrays_of(module, optimizer))
    blocking, durable = [], []
    for step in range(1, repeats + 2):
        began = clock()
        saver.save(step)
        blocking.append(clock() - began)
        saver.wait()
        durable.append(clock() - began)
    saver.close()
    return {"first": blocking[0], "blocking": blocking[1:], "durable": durable[1:]}


def restore(state: str, peer: str, directory: Path, repeats: int) -> dict[str, Any]:
    """The first restore of a fresh process, onto a fresh module with a stepped optimizer."""
    module, optimizer = states.build(state, seed=1)
    jax.block_until_ready(list(states.arrays_of(module, optimizer).values()))
    flat = lambda: states.arrays_of(module, optimizer)  # noqa: E731
    began = clock()
    restorer = PEERS[peer](directory, module, optimizer, flat)
    jax.block_until_ready(restorer.restore())
    return {"restore": [clock() - began]}


def loop(state: str, peer: str, directory: Path, repeats: int) -> dict[str, Any]:
    """A training loop under continuous saving: steps between durable checkpoints, step times.

    A step updates every array in one jitted call and then computes for a while, as a model would.
    PEER "none" saves nothing.
    """
    from torchax_ckpt import torchax_backend as backend

    module, optimizer = states.build(state)
    tensors = [*module.parameters()]
    tensors += [
        optimizer.state[p][k] for p in module.parameters() for k in ("exp_avg", "exp_avg_sq")
    ]
    work = jax.numpy.ones((768, 768))
    update = jax.jit(lambda xs: [x * 0.999 for x in xs])
    compute = jax.jit(lambda w: jax.lax.fori_loop(0, 4, lambda _, x: x @ w * 1e-3, w))

    def step() -> None:
        arrays = update([backend.buffer(t) for t in tensors])
        for tensor, array in zip(tensors, arrays, strict=True):
            backend.set_buffer(tensor, array)
        jax.block_until_ready((arrays, compute(work)))

    for _ in range(3):
        step()
    saver = None
    if peer != "none":
        flat = lambda: states.arrays_of(module, optimizer)  # noqa: E731
        saver = PEERS[peer](directory, module, optimizer, flat)
        saver.save(1)
        saver.wait()
    times: list[float] = []
    began_at = durable = 0
    is_saving = False
    intervals: list[int] = []
    count = 1
    until = clock() + float(os.environ.get("LOOP_SECS", "60"))
    while (len(intervals) < repeats and clock() < until) if saver else len(times) < repeats:
        began = clock()
        step()
        if saver is not None:
            if is_saving and not _in_flight(saver):
                is_saving = False
                durable += 1
                intervals.append(len(times) - began_at)
            if not is_saving:
                count += 1
                began_at = len(times)
                saver.save(count)
                is_saving = True
        times.append(clock() - began)
    if saver is not None:
        saver.wait()
        saver.close()
    return {"step": times, "intervals": intervals, "saves": durable}


def _in_flight(saver: Any) -> bool:
    for attribute, question in (
        ("_manager", lambda m: m.is_saving_in_progress()),
        ("_checkpointer", lambda c: c.is_saving_in_progress()),
        ("_ckpt", lambda c: c._saver.is_saving),
    ):
        if hasattr(saver, attribute):
            return question(getattr(saver, attribute))
    return False


def raw(state: str, peer: str, directory: Path, repeats: int) -> dict[str, Any]:
    """The medium: the state's bytes written to one file and fsynced, and read back."""
    module, optimizer = states.build(state)
    size = sum(v.nbytes for v in states.arrays_of(module, optimizer).values())
    block = os.urandom(16 << 20)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "raw"
    write, read = [], []
    for _ in range(repeats + 1):
        began = clock()
        with open(path, "wb", buffering=0) as file:
            left = size
            while left:
                left -= file.write(block[: min(left, len(block))])
            os.fsync(file.fileno())
        write.append(clock() - began)
        began = clock()
        with open(path, "rb", buffering=0) as file:
            while file.readinto(bytearray(16 << 20)):
                pass
        read.append(clock() - began)
    path.unlink()
    return {"bytes": size, "write": write[1:], "read": read[1:]}


if __name__ == "__main__":
    what, state, peer, directory, repeats = sys.argv[1:6]
    result = globals()[what](state, peer, Path(directory), int(repeats))
    print("RESULT " + json.dumps(result), flush=True)
