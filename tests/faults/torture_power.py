"""Cuts the power of a training program at random moments, and looks at what the disk had.

    python tests/faults/torture_power.py --cuts 300

The program (``killed_run.py``) writes to a file system in user space (``power_fuse.py``) that knows
what was synced (``power_disk.py``). A cut kills the program, and leaves of everything that was not
synced what chance says. The oracle then restores every step there is, and compares; the program
starts again from what is left. Whenever the program says that a step is durable, and whenever it
deletes one, each committed step must be on the disk.

Exit code 1 if a durable step was lost, a state was wrong, something was not on the disk that should
have been, leftovers piled up, or the program failed; 2 if this machine cannot mount such a file
system.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # it would start threads when imported

import argparse
import collections
import ctypes
import functools
import logging
import random
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import copied_run
import jax
import killed_run
import power_fuse
import tensorstore as ts
from copied_run import CopiedOracle
from killed_run import Log, Oracle, Phase, Settings, Verdict
from orbax.checkpoint._src.serialization import tensorstore_utils
from torture_kill import PR_SET_PDEATHSIG, Asked, fork, kill_at_random, preload, wait_for

from torchax_ckpt import CheckpointOptions, policies
from torchax_ckpt.storage.medium import fsync

COPIES = "copy and export"  # the commands, instead of a training program
TWO_PROCESSES = "two processes"
MODES = {
    "one tier": Settings(),
    "two tiers": Settings(has_local=True),
    "PreserveAll": Settings(policies.PreserveAll(), delete=0.2),
    "LatestN(1)": Settings(policies.LatestN(1)),
    "LatestN(2)": Settings(policies.LatestN(2)),
    "BestN": Settings(
        policies.AnyPreservationPolicy([policies.BestN(metric="loss", n=2), policies.LatestN(1)])
    ),
    "going back": Settings(back=0.35),
    "deleting": Settings(delete=0.35),
    "read_back": Settings(options=CheckpointOptions(read_back=True)),
    "compression": Settings(options=CheckpointOptions(compression=True)),
    TWO_PROCESSES: Settings(has_two_processes=True),
    COPIES: Settings(policies.PreserveAll()),
    "two tiers, going back": Settings(policies.LatestN(1), has_local=True, back=0.35),
}
# Syncs that can be switched off, to show that it is noticed: the paths that are then not synced.
OFF: dict[str, Callable[[str], bool]] = {
    "files": lambda path: "/writing-" in path and os.path.isfile(path),
    "folders": lambda path: "/writing-" in path and os.path.isdir(path),
    "names": lambda path: os.path.basename(path) in ("run", "local") and os.path.isdir(path),
    "drafts": lambda path: path.endswith(".draft"),
    "exports": lambda path: ".partial" in path or path.endswith("/exports"),
    "arrays": lambda path: False,  # TensorStore's own syncs instead
}


def switch_off(what: str) -> None:
    """Has the program sync less than it does."""
    sync, get_ts_context = fsync.sync, tensorstore_utils.get_ts_context

    def fewer(path: Any) -> None:
        if not OFF[what](os.fspath(path)):
            sync(path)

    def unsynced(*args: Any, **kwargs: Any) -> Any:
        return ts.Context({"file_io_sync": False}, parent=get_ts_context(*args, **kwargs))

    fsync.sync = fewer
    if what == "arrays":
        tensorstore_utils.get_ts_context = unsynced


def become_two() -> int:
    """Forks this process; both are one run of JAX, and die together. Returns which this one is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    index = 0 if os.fork() else 1
    if index:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    assert jax.process_count() == 2
    return index


def tell_nobody(what: str, **details: Any) -> None:
    """Stands in for the log, which the other process writes."""


def torture(
    num_cuts: int, max_secs: float, seed: int, off: str | None, modes: list[str], scratch: Path
) -> int:
    """Cuts so many times, or as often as time allows; prints the table; returns the exit code."""
    began = time.monotonic()
    choose = random.Random(seed)
    mount = scratch / "disk"
    mount.mkdir()
    preload()
    server = fork(lambda: power_fuse.serve(mount))
    assert wait_for(lambda: os.path.ismount(mount), server, 20), "the disk cannot be mounted"
    places = {name: mount / f"{number}" / "run" for number, name in enumerate(modes)}
    logs = {name: scratch / f"{number}.log" for number, name in enumerate(modes)}
    oracles = Asked(
        {
            name: functools.partial(
                CopiedOracle if name == COPIES else Oracle, places[name], logs[name], MODES[name]
            )
            for name in modes
        }
    )
    source, source_log = scratch / "source", scratch / "source.log"
    phase = Phase()
    cuts: collections.Counter[str] = collections.Counter()
    left: collections.Counter[str] = collections.Counter()
    totals = Verdict()
    failures: list[str] = []
    problems: list[str] = []
    num_audits = num_reusing = 0

    def start(mode: str, attempt: int, num_actions: int | None) -> int:
        phase.clear()
        seed = choose.randrange(1 << 30)

        def program() -> None:
            if off is not None:
                switch_off(off)
            settings, directory = MODES[mode], places[mode]

            def audit() -> None:
                for place in settings.places(directory):
                    if place.exists():
                        power_fuse.ask(mount, "audit", str(place.relative_to(mount)))

            log = Log(logs[mode])
            if mode == COPIES:
                given = source, source_log, directory, log, phase, attempt, seed, num_actions
                copied_run.run(*given, settings, audit)
                return
            if settings.has_two_processes and become_two() == 1:
                killed_run.run(
                    directory, tell_nobody, Phase(), attempt, seed, num_actions, None, settings
                )
                return
            killed_run.run(directory, log, phase, attempt, seed, num_actions, None, settings, audit)

        return fork(program)

    def look(mode: str, when: str, is_finished: bool = False) -> None:
        nonlocal num_audits
        verdict = oracles.inspect(mode, is_finished)
        totals.num_states += verdict.num_states
        audits, *found = power_fuse.ask(mount, "problems").splitlines()
        num_audits = int(audits)
        problems.extend(found)
        for kind in ("losses", "wrong", "leftovers"):
            getattr(totals, kind).extend(getattr(verdict, kind))
            found += getattr(verdict, kind)
        for sentence in found[:8]:
            print(f"{when}: {sentence}", flush=True)

    if COPIES in modes:
        make = Settings(policies.PreserveAll(), back=0, delete=0)
        saves = fork(
            lambda: killed_run.run(source, Log(source_log), phase, 1, seed, 16, None, make)
        )
        assert os.waitpid(saves, 0)[1] == 0, "there is nothing to copy"
    try:
        for attempt in range(1, num_cuts + 1):
            if time.monotonic() - began > max_secs:
                break
            mode = modes[(attempt - 1) % len(modes)]
            if failure := kill_at_random(start(mode, attempt, None), phase, choose):
                failures.append(f"attempt {attempt} ({mode}) {failure}")
                print(failures[-1], flush=True)
            what = power_fuse.ask(mount, "cut", str(choose.randrange(1 << 30)))
            cuts[mode] += 1
            num_reusing += mode not in (COPIES, TWO_PROCESSES) and killed_run.reuses(attempt)
            left.update(what.split("; "))
            look(mode, f"cut {attempt} ({mode}), while {phase.describe()}; left of {what}")
            if off and (problems or totals.losses or totals.wrong or failures):
                break  # that it is found out is all there is to see
        for mode in modes if off is None else ():
            if os.waitpid(start(mode, num_cuts + 1, 10), 0)[1] != 0:
                failures.append(f"the last attempt ({mode}), of which nobody cut the power, failed")
            look(mode, f"at the end ({mode})", is_finished=True)
    finally:
        oracles.close()
        power_fuse.unmount(mount)
        os.waitpid(server, 0)
    found = {
        "of programs that reuse what is unchanged": num_reusing,
        "states restored and compared": totals.num_states,
        "looks at what the disk has": num_audits,
        "durable steps lost": len(totals.losses),
        "wrong or failed restores": len(totals.wrong),
        "steps that the disk did not have": len(problems),
        "times leftovers piled up": len(totals.leftovers),
        "starts or saves refused": len(failures),
        "seed": seed,
        "seconds": round(time.monotonic() - began),
    }
    print(table(cuts, left, found), flush=True)
    is_bad = totals.losses or totals.wrong or problems or totals.leftovers or failures
    return 1 if is_bad else 0


def table(
    cuts: collections.Counter[str], left: collections.Counter[str], found: dict[str, int]
) -> str:
    """What happened, for people."""
    rows = [
        ("cuts of the power", cuts.total()),
        *((f"  {name}", count) for name, count in cuts.items()),
        *((f"  left of {name}", count) for name, count in sorted(left.items())),
        *found.items(),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value:>6}" for name, value in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then start no more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--off", choices=OFF, help="syncs to switch off; must be found out")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    arguments = parser.parse_args()
    if problem := power_fuse.missing():
        print(f"torture-power cannot run on this machine: {problem}", file=sys.stderr)
        return 2
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        return torture(
            arguments.cuts,
            arguments.seconds,
            arguments.seed,
            arguments.off,
            arguments.modes,
            Path(scratch),
        )


if __name__ == "__main__":
    sys.exit(main())
