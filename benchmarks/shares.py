"""Shows which rooms of the library the time of saves goes into, on each of its two threads.

    python benchmarks/shares.py [--state deep] [--saves 60] [--functional]

Saves a state while the training thread waits for a device in between, and profiles the calls of
``save`` on the training thread and the work of the save on its own thread, with cProfile. A
function that is no part of this package or of a library that it builds on counts for its caller.
cProfile makes small functions look longer than they are, so that shares are more reliable than
times; the times without the profile are printed first. "waiting" is for other threads and for the
disk; a wait for the interpreter's lock is part of the time of the function that waits.

Two more figures say what bounds a save from below. The same state is captured a second time at
once, when the caches of the processor hold what it consists of. And bare Orbax saves the arrays
that a save of this library stores, which are far fewer than the leaves, with no digests and no
manifest.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import collections
import cProfile
import pstats
import re
import shutil
import statistics
import tempfile
import time
from typing import Any
from unittest import mock

import jax
import torchax
from orbax.checkpoint import v1 as ocp

torchax.enable_globally()

import states  # noqa: E402 - after the devices are forced

from torchax_ckpt import TorchaxCheckpointer  # noqa: E402
from torchax_ckpt.policies import LatestN  # noqa: E402
from torchax_ckpt.saving.save import Save  # noqa: E402
from torchax_ckpt.snapshot.snapshotter import Snapshot  # noqa: E402
from torchax_ckpt.state.training_state import TrainingState  # noqa: E402

# How long the training thread waits for a device between saves.
_DEVICE_SECS = 0.05
_WAITS = re.compile(r"'(acquire|poll|wait|select)' of|built-in method \w+\.(fsync|sleep)")
_LIBRARIES = ("jax", "numpy", "orbax", "tensorstore", "torch", "torchax")


def room(function: tuple[str, int, str]) -> str | None:
    """Returns the room or library of a profiled function; None if it counts for its callers."""
    if _WAITS.search(function[2]):
        return "waiting"
    if found := re.search(r"torchax_ckpt/(?:(\w+(?:/\w+)*)/)?(\w+)\.py$", function[0]):
        return f"torchax_ckpt/{found[1] or found[2]}"
    if found := re.search(r"site-packages/(\w+)/", function[0]):
        return found[1] if found[1] in _LIBRARIES else None
    return None


def shares(profile: cProfile.Profile) -> dict[str, float]:
    """Returns room -> seconds spent in its functions, and in what they call elsewhere."""
    stats: Any = pstats.Stats(profile)
    found: dict[str, float] = collections.defaultdict(float)

    def charge(function: Any, secs: float, seen: tuple[Any, ...]) -> None:
        callers = stats.stats[function][4] if function in stats.stats else {}
        weights = {caller: entry[2] for caller, entry in callers.items() if caller not in seen}
        if (where := room(function)) is not None or not sum(weights.values()) or len(seen) > 8:
            found[where or "others"] += secs
            return
        for caller, weight in weights.items():
            charge(caller, secs * weight / sum(weights.values()), (*seen, function))

    for function, (_, _, secs, _, _) in stats.stats.items():
        charge(function, secs, ())
    return found


class Program:
    """A program that waits for its device and saves, again and again.

    Args:
      state: the name of the state.
      is_functional: whether it passes a functional state to ``save``.
      ckpt: the checkpointer.
    """

    def __init__(self, state: str, is_functional: bool, ckpt: TorchaxCheckpointer) -> None:
        module, optimizer = states.build(state)
        self._ckpt = ckpt
        self._step = 0
        self._tree = states.arrays_of(module, optimizer) if is_functional else None
        self._update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0.999, tree))
        if not is_functional:
            ckpt.attach(module, optimizer)

    def save(self, count: int) -> list[float]:
        """Saves ``count`` times, and returns the seconds for which each save blocked."""
        blocking = []
        for _ in range(count):
            if self._tree is not None:
                self._tree = self._update(self._tree)
            time.sleep(_DEVICE_SECS)
            self._step += 1
            began = time.perf_counter()
            self._ckpt.save(self._step, state=self._tree, force=True)
            blocking.append(time.perf_counter() - began)
            time.sleep(_DEVICE_SECS)
            self._ckpt.wait_until_finished()
        return blocking


def captures(program: Program, count: int) -> tuple[float, float]:
    """Returns the seconds of a capture, and of the same capture made again at once: medians."""
    times: list[tuple[float, float]] = []
    capture = TrainingState.capture

    def twice(self: Any, state: Any = None) -> Any:
        began = time.perf_counter()
        capture(self, state)
        middle = time.perf_counter()
        result = capture(self, state)
        times.append((middle - began, time.perf_counter() - middle))
        return result

    with mock.patch.object(TrainingState, "capture", twice):
        program.save(count)
    first, second = map(statistics.median, zip(*times, strict=True))
    return first, second


def processor_secs(program: Program, count: int) -> tuple[float, float, int]:
    """Returns the processor time of a save, of bare Orbax's save of what is stored, and how many.

    The last is the number of arrays that a save stores.
    """
    stored: dict[str, Any] = {}
    original = Snapshot.to_store

    def kept(self: Any) -> Any:
        result = original(self)
        stored.update(result[1])
        return result

    with mock.patch.object(Snapshot, "to_store", kept):
        program.save(1)
    tree = {name.replace("/", "."): array for name, array in stored.items()}
    began = time.process_time()
    program.save(count)
    own = time.process_time() - began
    with tempfile.TemporaryDirectory() as directory:
        ocp.save(f"{directory}/0", tree)
        began = time.process_time()
        for number in range(1, count + 1):
            ocp.save_async(f"{directory}/{number}", tree).result()
            shutil.rmtree(f"{directory}/{number}")
        return own / count, (time.process_time() - began) / count, len(tree)


def print_shares(title: str, profile: cProfile.Profile, count: int) -> None:
    found = shares(profile)
    total = sum(found.values())
    print(f"\n| {title} | share | a save, profiled |\n|---|---|---|")
    for name, secs in sorted(found.items(), key=lambda item: -item[1]):
        if secs > total / 100:
            print(f"| {name} | {secs / total:.0%} | {secs / count * 1e3:.1f} ms |")
    print(f"| all | 100% | {total / count * 1e3:.1f} ms |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", default="deep", choices=sorted(states.STATES))
    parser.add_argument("--saves", type=int, default=60)
    parser.add_argument("--functional", action="store_true", help="save a functional state")
    args = parser.parse_args()
    on_training, on_saver = cProfile.Profile(), cProfile.Profile()
    run, save = Save.run, TorchaxCheckpointer.save

    def profiled_run(self: Any, *given: Any) -> Any:
        return on_saver.runcall(run, self, *given)

    def profiled_save(self: Any, *given: Any, **named: Any) -> Any:
        return on_training.runcall(save, self, *given, **named)

    with (
        tempfile.TemporaryDirectory() as directory,
        TorchaxCheckpointer(directory, preservation_policy=LatestN(1)) as ckpt,
    ):
        program = Program(args.state, args.functional, ckpt)
        program.save(5)  # The first saves compile, and detect whether the program donates.
        plain = program.save(args.saves)
        cold, warm = captures(program, args.saves)
        own, bare, num_stored = processor_secs(program, args.saves)
        with (
            mock.patch.object(Save, "run", profiled_run),
            mock.patch.object(TorchaxCheckpointer, "save", profiled_save),
        ):
            program.save(args.saves)
    low, middle, high = min(plain), statistics.median(plain), max(plain)
    print(
        f"{args.state}, {args.saves} saves without the profile: blocking {middle * 1e3:.1f} ms "
        f"({low * 1e3:.1f} - {high * 1e3:.1f})"
    )
    print(f"a capture takes {cold * 1e3:.1f} ms, and made again at once {warm * 1e3:.1f} ms")
    bound = f"bare Orbax takes {bare * 1e3:.0f} ms for the {num_stored} arrays that it stores"
    print(f"processor time of a save: {own * 1e3:.0f} ms; {bound}")
    print_shares("training thread", on_training, args.saves)
    print_shares("thread of the save", on_saver, args.saves)


if __name__ == "__main__":
    main()
