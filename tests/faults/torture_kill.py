"""Kills a training program with SIGKILL at random moments, and looks at what is left.

    python tests/faults/torture_kill.py --kills 300
    python tests/faults/torture_kill.py --kills 300 --processes 2

Three processes: this one forks the others and kills; the program (``killed_run.py``) trains; the
oracle restores every step there is after every kill and compares. They are forked from here, where
everything is imported but neither JAX's backend nor any thread is started, as importing takes
seconds and a kill should not.

With ``--processes``, a program of so many processes trains, see ``killed_hosts.py``.

Exit code 1 if a durable step was lost, a state was wrong, leftovers piled up, or the program
failed.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # it would start threads when imported

import argparse
import collections
import contextlib
import ctypes
import functools
import importlib
import json
import logging
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import killed_run
from killed_run import Log, Oracle, Phase, Verdict

# Kills are timed from the start of the process; from its first save; or from when it is seen at
# something that takes a few milliseconds, which the others seldom meet.
WAYS = {"early": 0.2, "saving": 0.4, "aimed": 0.4}
EARLY_SECS, SAVING_SECS, AIMED_SECS = 1.5, 1.0, 0.004
AIMS = [
    "recovering",
    "linking",
    "committing",
    "setting aside",
    "settling",
    "pruning",
    "deleting",
    "going back",
]
PATIENCE_SECS = 3.0
STUCK_SECS = 120
PR_SET_PDEATHSIG = 1


def fork(child: Callable[[], None]) -> int:
    """Starts a process in a group of its own."""
    assert len(os.listdir("/proc/self/task")) == 1, "forking is only sound before threads start"
    pid = os.fork()
    if pid:
        with contextlib.suppress(PermissionError, ProcessLookupError):  # it has done so, or ended
            os.setpgid(pid, pid)  # both processes do this, because either may run first
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        # Nobody else would end it if this process were killed.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        child()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def preload() -> None:
    """Imports here what a process that trains and saves imports, found out by one that did."""
    reads, writes = os.pipe()

    def learn() -> None:
        before = set(sys.modules)
        with tempfile.TemporaryDirectory() as scratch:
            run = Path(scratch)
            killed_run.run(run / "run", Log(run / "log"), Phase(), 0, 0, 4, None)
            Oracle(run / "run", run / "log").inspect()
        with os.fdopen(writes, "w") as pipe:
            json.dump(sorted(set(sys.modules) - before), pipe)

    pid = fork(learn)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        names = json.load(pipe)
    assert os.waitpid(pid, 0)[1] == 0, "the program fails even if nobody kills it"
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # some can only be imported by what imports them
            continue


class Asked:
    """Oracles in a process of their own: answer one question per line.

    Args:
      make: name -> makes an oracle, in that process.
    """

    def __init__(self, make: Mapping[str, Callable[[], Oracle]]) -> None:
        ask_reads, self._ask = os.pipe()
        self._answers, answer_writes = os.pipe()

        def serve() -> None:
            os.close(self._ask)
            oracles = {name: each() for name, each in make.items()}
            with os.fdopen(ask_reads, "rb") as questions, os.fdopen(answer_writes, "wb") as answers:
                for question in questions:
                    name, is_finished = json.loads(question)
                    pickle.dump(oracles[name].inspect(is_finished), answers)
                    answers.flush()

        self.pid = fork(serve)
        os.close(ask_reads)
        os.close(answer_writes)
        self._pipe = os.fdopen(self._answers, "rb")

    def inspect(self, name: str, is_finished: bool = False) -> Verdict:
        os.write(self._ask, json.dumps([name, is_finished]).encode() + b"\n")
        verdict: Verdict = pickle.load(self._pipe)
        return verdict

    def close(self) -> None:
        os.close(self._ask)
        self._pipe.close()
        os.waitpid(self.pid, 0)


def torture(
    num_kills: int, max_secs: float, seed: int, weakening: str | None, scratch: Path
) -> int:
    """Kills so many times, or as often as time allows; prints the table; returns the exit code."""
    choose = random.Random(seed)
    directory, log_path = scratch / "run", scratch / "log"
    preload()
    began = time.monotonic()
    oracle = Asked({"run": lambda: Oracle(directory, log_path)})
    phase = Phase()
    phases: collections.Counter[str] = collections.Counter()
    totals = Verdict()
    failures = []

    def start(attempt: int, num_actions: int | None) -> int:
        phase.clear()
        seed = choose.randrange(1 << 30)
        return fork(
            lambda: killed_run.run(
                directory, Log(log_path), phase, attempt, seed, num_actions, weakening
            )
        )

    def add(verdict: Verdict, when: str) -> None:
        totals.num_states += verdict.num_states
        totals.num_host_linked += verdict.num_host_linked
        for kind in ("losses", "wrong", "leftovers"):
            found = getattr(verdict, kind)
            getattr(totals, kind).extend(found)
            for sentence in found:
                print(f"{when}: {sentence}", flush=True)

    try:
        for attempt in range(1, num_kills + 1):
            if time.monotonic() - began > max_secs:
                break
            if failure := kill_at_random(start(attempt, None), phase, choose):
                failures.append(f"attempt {attempt} {failure}")
                print(failures[-1], flush=True)
            phases[phase.describe()] += 1
            add(oracle.inspect("run"), f"kill {attempt}, while {phase.describe()}")
            if weakening and (totals.losses or totals.wrong):
                break  # that it is found out is all there is to see
        if os.waitpid(start(num_kills + 1, 10), 0)[1] != 0:
            failures.append("the last attempt, which nobody killed, failed")
        add(oracle.inspect("run", is_finished=True), "at the end")
    finally:
        oracle.close()
    wall_secs = time.monotonic() - began
    print(table(seed, phases, totals, failures, wall_secs), flush=True)
    return 1 if totals.losses or totals.wrong or totals.leftovers or failures else 0


def kill_at_random(pid: int, phase: Phase, choose: random.Random) -> str:
    """Kills a program at a random moment; returns what else has ended it, or "" if nothing."""
    failure = wait_at_random(pid, phase, choose)
    if not has_ended(pid):
        os.killpg(pid, signal.SIGKILL)
    if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
        failure = f"ended by itself, in {phase.describe()}"
    return failure


def wait_at_random(pid: int, phase: Phase, choose: random.Random) -> str:
    """Waits for a random moment to kill a program; returns where it is stuck, or "" if nowhere."""
    aim, early, late, after = (
        choose.choice(AIMS),
        choose.uniform(0, EARLY_SECS),
        choose.uniform(0, SAVING_SECS),
        choose.uniform(0, AIMED_SECS),
    )
    (way,) = choose.choices(list(WAYS), list(WAYS.values()))
    failure = ""
    if way == "early":
        time.sleep(early)
    else:
        # What is recovered from a kill before, is so before anything is saved.
        is_aimed_early = way == "aimed" and aim == "recovering"
        if not is_aimed_early and not wait_for(phase.has_saved, pid, STUCK_SECS):
            failure = f"is stuck in {phase.describe()}"
        if way == "aimed":
            wait_for(functools.partial(phase.is_at, aim), pid, PATIENCE_SECS)
        time.sleep(after if way == "aimed" else late)
    return failure


def wait_for(condition: Callable[[], bool], pid: int, timeout_secs: float) -> bool:
    """Whether this came to be, or the process ended, in time."""
    deadline = time.monotonic() + timeout_secs
    while not condition() and not has_ended(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True


def has_ended(pid: int) -> bool:
    """Whether a child has ended; it can still be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def table(
    seed: int,
    phases: collections.Counter[str],
    totals: Verdict,
    failures: list[Any],
    wall_secs: float,
) -> str:
    """What happened, for people."""
    rows = [
        ("SIGKILLs", phases.total()),
        *((f"  while {name}", count) for name, count in phases.most_common()),
        ("states restored and compared", totals.num_states),
        ("durable steps lost", len(totals.losses)),
        ("wrong or failed restores", len(totals.wrong)),
        ("times leftovers piled up", len(totals.leftovers)),
        ("failures of the program", len(failures)),
        *([("looks at steps that share files", totals.num_linked)] if totals.num_linked else []),
        ("looks at steps that share files of host leaves", totals.num_host_linked),
        ("seed", seed),
        ("seconds", round(wall_secs)),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value:>6}" for name, value in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then start no more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="of the program")
    weakenings = (*killed_run.WEAKENINGS, "one-copy")
    parser.add_argument("--weakened", choices=weakenings, help="must report losses")
    arguments = parser.parse_args()
    if arguments.weakened == "one-copy" and arguments.processes == 1:
        parser.error("--weakened one-copy: only with several processes")
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.processes > 1:
            import killed_hosts  # imports this module

            return killed_hosts.torture(
                *(arguments.kills, arguments.seconds, arguments.seed, arguments.processes),
                arguments.weakened,
                Path(scratch),
            )
        return torture(
            arguments.kills, arguments.seconds, arguments.seed, arguments.weakened, Path(scratch)
        )


if __name__ == "__main__":
    sys.exit(main())
