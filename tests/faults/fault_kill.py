"""Kills one or all processes of a training program with SIGKILL, at random moments.

The program (``disturbed.py``) trains, saves, prunes, deletes and goes back. After every kill the
oracle restores all steps, and the newest once more from a directory where it is alone. Most starts
reuse arrays that did not change since earlier steps.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from disturbed import Settings, steps_in
from oracle import LEFT, LOST, WRONG
from starts import FAILED, HUNG, KILLED, Runs

if TYPE_CHECKING:
    from torture import Torture

FINDINGS = (LOST, WRONG, LEFT, HUNG, FAILED)
WEAKENINGS = ("copy", "delete-first", "mixed", "one-copy")
# How often one of several processes is killed, and the others end by themselves; else all are.
ONE = 0.2
GAPS_SECS = (0, 0, 0.005, 0.1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=1, help="of the program")


def torture(torture: Torture) -> None:
    """Kills so many times."""
    choose, count, weakening = torture.choose, torture.given.processes, torture.given.weakened
    settings = Settings() if count == 1 else Settings(every=1, forced=0.25, back=0.15, delete=0)
    runs = Runs(torture, {"run": settings})
    directory = runs.directories["run"]
    link = functools.partial(link_neighbours, directory) if weakening == "one-copy" else None
    for _ in torture.rounds():
        processes = runs.begin("run", count, weakening=weakening, on_durable=link)
        victim = choose.randrange(count)
        processes.wait_at_random(victim, choose)
        phase = processes.phases[victim].describe()
        torture.count("SIGKILLs", part=f"while {phase}")
        processes.send(signal.SIGKILL, [victim])
        if choose.random() >= ONE:
            time.sleep(choose.choice(GAPS_SECS) if count > 1 else 0)
            processes.send(signal.SIGKILL, range(count))
        processes.wait()
        ends = KILLED if count > 1 else {-signal.SIGKILL}
        runs.look("run", processes, f"killed while {phase}", ends)
    if not weakening:
        processes = runs.begin("run", count, 10)
        processes.wait()
        runs.look("run", processes, "which nobody killed", {0}, is_finished=True)


def link_neighbours(directory: Path) -> None:
    """Has the newest step share files with the one before, as a run with one copy would."""
    for before, newest in itertools.pairwise(steps_in(directory)[-2:]):
        for path in before.glob("state/d/*"):
            # Another process has done so, or a step was deleted meanwhile.
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                (newest / "state" / "d" / path.name).hardlink_to(path)
