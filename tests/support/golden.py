"""Writes and reads the golden checkpoints of two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support import PROGRAMS
from support.processes import run_processes

COUNT = 2


def write(directory: Path, step: int, hosts: Path | None = None) -> list[Any]:
    """Trains and saves a step in two processes; returns the final state of each.

    Args:
      directory: the durable directory.
      step: the number of the step.
      hosts: the folder of the local tiers, one for each process. If given, the step is saved only
        there.
    """
    return _run("write", directory, step, hosts, 0)


def read(directory: Path, step: int, hosts: Path | None = None) -> list[Any]:
    """Resumes from a step in two processes with another seed; returns the state of each."""
    return _run("read", directory, step, hosts, 77)


def _run(act: str, directory: Path, step: int, hosts: Path | None, seed: int) -> list[Any]:
    arguments = str(directory), str(hosts or ""), str(step), str(seed), act
    reports = run_processes(PROGRAMS / "golden_program.py", COUNT, *arguments, devices=2)
    return [report for (report,) in reports]
