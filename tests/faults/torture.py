"""Tortures the package, in rounds, and prints what came of it.

    python tests/faults/torture.py --fault kill --count 300
    python tests/faults/torture.py --fault kill --help

Each fault is a file, ``fault_NAME.py``, which does the disturbance and the check. What it finds
ends the torture with exit code 1; 2 says that this machine cannot run it. With ``--weakened``
something is less careful than it should be; the torture then stops as soon as that is found.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import logging
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Fault -> the number of JAX's devices, and how often it is done by default.
FAULTS = {
    "kill": (1, 300),
    "hosts": (1, 200),
    "power": (1, 300),
    "lease": (1, 200),
    "flips": (8, 2000),
    "gcs": (1, 500),
    "mirror": (1, 50),
    "fuzz": (1, 100_000),
    "endurance": (2, 10_000),
}
FORKING = ("power", "lease")  # have file systems in processes of their own


class Torture:
    """The rounds of a torture, and its table."""

    def __init__(self, given: argparse.Namespace, scratch: Path, findings: Sequence[str]) -> None:
        self.given, self.scratch = given, scratch
        self.choose = random.Random(given.seed)
        self._rows: dict[str, int] = {}
        self.parts: dict[str, collections.Counter[str]] = {}
        self.findings: dict[str, list[str]] = {row: [] for row in findings}
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def rounds(self, first: int = 1) -> Iterator[int]:
        """The numbers of the rounds; fewer where the time is over, or a weakness is found out."""
        for number in range(first, first + self.given.count):
            is_over = time.monotonic() - self._began > self.given.seconds
            if number > first and (is_over or (self.given.weakened and self.is_bad)):
                return
            yield number

    @property
    def is_bad(self) -> bool:
        return any(self.findings.values())

    def count(self, row: str, number: int = 1, part: str = "") -> None:
        """Adds to a row of the table, and to a part of it."""
        with self._lock:
            self._rows[row] = self._rows.get(row, 0) + number
            if part:
                self.parts.setdefault(row, collections.Counter())[part] += number

    def find(self, found: Mapping[str, Sequence[str]], where: str = "", more: str = "") -> None:
        """Takes in and prints sentences, by the rows of what must not be found."""
        for row, sentences in found.items():
            self.findings[row] += sentences
            for sentence in sentences[:8]:
                print(f"{where}: {sentence}" if where else sentence, flush=True)
        if more:
            print(more, flush=True)

    def table(self) -> str:
        """What happened, for people."""
        rows: list[tuple[str, int]] = []
        for row, number in self._rows.items():
            parts = self.parts.get(row, collections.Counter()).most_common()
            rows += [(row, number), *((f"  {part}", count) for part, count in parts)]
        rows += [(row, len(sentences)) for row, sentences in self.findings.items()]
        rows += [("seed", self.given.seed), ("seconds", round(time.monotonic() - self._began))]
        width = max(len(row) for row, _ in rows)
        return "\n".join(f"{row:<{width}}  {number:>8}" for row, number in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    parser.add_argument("--fault", choices=FAULTS, required=True)
    name = parser.parse_known_args(arguments)[0].fault
    devices, count = FAULTS[name]
    # Before anything imports JAX or numpy, which would start threads in what forks.
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        **({"OPENBLAS_NUM_THREADS": "1"} if name in FORKING else {}),
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3"),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    sys.path.insert(0, str(Path(__file__).parents[1]))
    fault: Any = importlib.import_module(f"fault_{name}")
    parser = argparse.ArgumentParser(
        description=fault.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fault", choices=FAULTS, required=True)
    parser.add_argument("--count", type=int, default=count, help="of rounds")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then start no more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weakened", choices=fault.WEAKENINGS, help="what must be found out")
    fault.add_arguments(parser)
    given = parser.parse_args(arguments)
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        torture = Torture(given, Path(scratch), fault.FINDINGS)
        if problem := fault.torture(torture):
            print(f"torture {name} cannot run on this machine: {problem}", file=sys.stderr)
            return 2
        print(torture.table(), flush=True)
    return 1 if torture.is_bad else 0


if __name__ == "__main__":
    sys.exit(main())
