"""What writes and reads the golden checkpoints of two processes: see ``support.run_processes``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.processes import run_processes

COUNT = 2
_PROGRAM = """
    import sys
    from processes_program import INDEX, Training, report
    from torchax_ckpt import LocalTier, TorchaxCheckpointer, policies

    directory, hosts, step, seed = *sys.argv[4:6], *map(int, sys.argv[6:8])
    every = policies.FixedIntervalPolicy(step)
    ckpt = TorchaxCheckpointer(
        directory,
        save_decision_policy=policies.SpecificStepsPolicy(()) if hosts else every,
        local=LocalTier(f"{hosts}/{INDEX}", save_decision_policy=every) if hosts else None,
    )
    training = Training(seed, width=8)
    start = training.attach(ckpt)
"""

_WRITE = (
    _PROGRAM
    + """
    for number in range(1, step + 1):
        training.step()
        ckpt.save(number, metrics={"loss": 0.25, "note": "golden", "history": [1, None, True]})
    ckpt.close()
    report(own=training.own(), whole=training.whole())
"""
)

_READ = (
    _PROGRAM
    + """
    tier = ckpt.restore().tier
    report(start=start, tier=tier, own=training.own(), whole=training.whole())
    training.step()
    ckpt.save(2 * step)
    ckpt.close()
"""
)


def write(directory: Path, step: int, hosts: Path | None = None) -> list[Any]:
    """Two processes train and save a step; what each of them has then.

    Args:
      directory: the durable one.
      step: its number.
      hosts: where the local tiers are, one for each process; there alone the step is saved.
    """
    return [report for (report,) in _run(_WRITE, directory, step, hosts, 0)]


def read(directory: Path, step: int, hosts: Path | None = None) -> list[Any]:
    """Two processes that began otherwise go on from there; what each of them has then."""
    return [report for (report,) in _run(_READ, directory, step, hosts, 77)]


def _run(source: str, directory: Path, step: int, hosts: Path | None, seed: int) -> list[Any]:
    return run_processes(
        source, COUNT, str(directory), str(hosts or ""), str(step), str(seed), devices=2
    )
