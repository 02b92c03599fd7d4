"""Writes and reads the golden checkpoints of two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support import PROGRAMS
from support.processes import run_processes

COUNT = 2
METRICS = {"loss": 0.25, "note": "golden", "history": [1, None, True]}


def write(directory: Path, step: int, hosts: Path | None = None) -> list[Any]:
    """Trains and saves a step in two processes; returns the final state of each.

    If the folder of the local tiers is given as ``hosts``, the step is saved only there.
    """
    reports = _run(directory, step, hosts, 0, "attach", ["train", step], "close")
    return [{name: end[name] for name in ("own", "whole")} for _, end, _ in reports]


def read(directory: Path, step: int, hosts: Path | None = None) -> list[Any]:
    """Resumes from a step in two processes with another seed; returns the state of each."""
    reports = _run(directory, step, hosts, 77, "attach", "restore", ["train", 2 * step], "close")
    names = ("start", "own", "whole")
    return [
        {"tier": again["tier"], **{name: first[name] for name in names}}
        for first, again, *_ in reports
    ]


def _run(directory: Path, step: int, hosts: Path | None, seed: int, *do: Any) -> list[Any]:
    settings = {"directory": str(directory), "seed": seed, "width": 8, "metrics": METRICS, "do": do}
    local = {"every": [], "ramdisks": str(hosts), "every_local": step}
    settings |= {"every": step} if hosts is None else local
    return run_processes(PROGRAMS / "group.py", COUNT, settings)
