"""Shows that slow saves of a large state are slow because memory is, which the program left alone.

    python benchmarks/cold_memory.py [--state gpt2] [--saves 11]

Before each save, and after gigabytes were written and read, the program counts in a loop that needs
no memory, and walks over small objects that nobody has touched since the save before, twice. If a
save is slow, and the first walk is slow as well, but neither the second walk nor the loop is, then
the first access to memory is what takes the time.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import states
from peers import PEERS


def milliseconds(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", default="gpt2", choices=sorted(states.STATES))
    parser.add_argument("--saves", type=int, default=11)
    args = parser.parse_args()
    module, optimizer = states.build(args.state)
    size = sum(a.nbytes for a in states.arrays_of(module, optimizer).values())
    objects: list[Any] = [{"a": i, "b": [i]} for i in range(200_000)]  # some 50 MB
    walk = lambda: sum(each["a"] for each in objects[::40])  # noqa: E731
    print("| save | blocks, ms | loop, ms | first walk, ms | second walk, ms | page faults |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        flat = lambda: states.arrays_of(module, optimizer)  # noqa: E731
        saver = PEERS["torchax_ckpt"](root / "run", module, optimizer, flat, keep=None)
        for step in range(1, args.saves + 1):
            times = [milliseconds(lambda: sum(range(100_000))), *map(milliseconds, (walk, walk))]
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            blocking = milliseconds(lambda step=step: saver.save(step))  # type: ignore[misc]
            faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
            saver.wait()
            measure.medium(root / "raw", size)
            shutil.rmtree(root / "run" / str(step - 1), ignore_errors=True)
            columns = " | ".join(f"{each:.1f}" for each in (blocking, *times))
            print(f"| {step} | {columns} | {faults} |", flush=True)
        saver.close()


if __name__ == "__main__":
    main()
