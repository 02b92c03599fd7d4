"""The golden checkpoints that two processes write and read together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support import PROGRAMS
from support.processes import run_processes

COUNT = 2


def write(directory: Path, step: int, hosts: Path | None = None) -> list[Any]:
    """Two processes train and save a step; what each of them has then.

    Args:
      directory: the durable one.
      step: its number.
      hosts: where the local tiers are, one for each process; there alone the step is saved.
    """
    return _run("write", directory, step, hosts, 0)


def read(directory: Path, step: int, hosts: Path | None = None) -> list[Any]:
    """Two processes that began otherwise go on from there; what each of them has then."""
    return _run("read", directory, step, hosts, 77)


def _run(act: str, directory: Path, step: int, hosts: Path | None, seed: int) -> list[Any]:
    arguments = str(directory), str(hosts or ""), str(step), str(seed), act
    reports = run_processes(PROGRAMS / "golden_program.py", COUNT, *arguments, devices=2)
    return [report for (report,) in reports]
