"""Writes and reads the golden checkpoints of two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support import PROGRAMS
from support.live import Together
from support.processes import run_processes

COUNT = 2
METRICS = {"loss": 0.25, "note": "golden", "history": [1, None, True]}


def write(directory: Path, step: int, hosts: Path | None = None) -> list[Any]:
    """Trains and saves a step in two processes; returns the final state of each.

    If the folder of the local tiers is given as ``hosts``, the step is saved only there.
    """
    reports = _run(run_processes, directory, step, hosts, 0, "attach", ["train", step], "close")
    return [{name: end[name] for name in ("own", "whole")} for _, end, _ in reports]


def read(together: Together, directory: Path, step: int, hosts: Path | None = None) -> list[Any]:
    """Resumes from a step in two processes with another seed; returns the state of each."""
    do = "attach", "restore", ["train", 2 * step], "close"
    reports = _run(together, directory, step, hosts, 77, *do)
    names = ("start", "own", "whole")
    return [
        {"tier": again["tier"], **{name: first[name] for name in names}}
        for first, again, *_ in reports
    ]


def _run(
    run: Together, directory: Path, step: int, hosts: Path | None, seed: int, *do: Any
) -> list[Any]:
    settings = {"directory": str(directory), "seed": seed, "width": 8, "metrics": METRICS, "do": do}
    local = {"every": [], "ramdisks": str(hosts), "every_local": step}
    settings |= {"every": step} if hosts is None else local
    return run(PROGRAMS / "group.py", COUNT, settings)
