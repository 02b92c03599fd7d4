"""Kills one or all processes of a training program with SIGKILL, at random moments.

The program (``hosts_run.py``) saves each step. Most starts take over what did not change since
earlier steps. After every kill, the oracle restores all steps as that of ``torture_hosts.py`` does,
the newest step once more from a directory where it is alone, and looks for files that two
neighbours share.
"""

from __future__ import annotations

import collections
import functools
import itertools
import random
import shutil
import signal
import socket
import time
from pathlib import Path

import killed_run
import torture_hosts
import torture_kill
from hosts_run import Bounds, HostsOracle, Start
from killed_run import Log, Verdict

BOUNDS = Bounds(process_secs=5, heartbeat_secs=10, start_secs=20)
LIMIT_SECS = 60
# How often one process is killed, and the others end by themselves; else all are killed.
ONE = 0.2
GAPS_SECS = (0, 0, 0.005, 0.1)


class LinksOracle(HostsOracle):
    """Also checks that the newest step is complete alone, and that neighbours share no files."""

    def inspect(self, is_finished: bool = False) -> Verdict:
        verdict = super().inspect(is_finished)
        steps = self._settings.opened(self._directory).all_steps()
        used = {step: files(self._directory / str(step)) for step in steps}
        for before, after in itertools.pairwise(steps):
            # Between others, a step was saved that has gone since: the newest three steps are kept,
            # and the one that the run resumed from.
            if after == before + 1 and used[before] & used[after]:
                verdict.wrong.append(f"steps {before} and {after} share files")
        verdict.num_linked = sum(
            any(used[step] & used[other] for other in steps if other != step) for step in steps
        )
        if steps:
            self._restore_alone(steps[-1], verdict)
        return verdict

    def _restore_alone(self, step: int, verdict: Verdict) -> None:
        alone = self._directory.with_name("alone")
        shutil.rmtree(alone, ignore_errors=True)
        shutil.copytree(self._directory / str(step), alone / str(step))
        restored = self._make()
        with self._settings.opened(alone) as reader:
            if restored.attach_to(reader) != step:
                verdict.wrong.append(f"step {step} is not found in a directory of its own")
        if restored.digest() != self.expected(step, restored.lineage):
            verdict.wrong.append(f"step {step} alone: wrong state")
        verdict.num_states += 1


def files(step: Path) -> set[int]:
    """The files of a step's arrays, as numbers that are equal for links to one file."""
    return {path.stat().st_ino for path in (step / "state").rglob("d/*")}


def torture(
    num_kills: int,
    max_secs: float,
    seed: int,
    num_processes: int,
    weakening: str | None,
    scratch: Path,
) -> int:
    """Kills so many times, or as often as time allows; prints the table; returns the exit code."""
    choose = random.Random(seed)
    (scratch / "program").mkdir()
    directory, log_path, output = scratch / "program" / "run", scratch / "log", scratch / "output"
    torture_kill.preload()
    began = time.monotonic()
    oracle = torture_kill.Asked({"run": functools.partial(LinksOracle, directory, log_path)})
    phases: collections.Counter[str] = collections.Counter()
    totals, failures = Verdict(), list[str]()

    def begin(attempt: int, num_actions: int) -> torture_hosts.Processes:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        start = Start(
            *(attempt, num_processes, port, False, choose.randrange(1 << 30), num_actions, BOUNDS),
            weakening=weakening,
            durable_steps=1,
            reuse=weakening == "one-copy" or killed_run.reuses(attempt),
        )
        Log(log_path)("starting", count=num_processes, has_local=False)
        return torture_hosts.Processes(directory, log_path, output, start, LIMIT_SECS)

    def look(processes: torture_hosts.Processes, when: str, *, is_finished: bool = False) -> None:
        found = [f"processes {processes.hung} hung"] if processes.hung else []
        allowed = {0} if is_finished else torture_hosts.ENDS.keys() - {0}
        if not processes.hung and not set(processes.codes.values()) <= allowed:
            found.append(f"ended with {processes.codes}")
        failures.extend(found)
        verdict = oracle.inspect("run", is_finished)
        totals.num_states += verdict.num_states
        totals.num_linked += verdict.num_linked
        totals.num_host_linked += verdict.num_host_linked
        for kind in ("losses", "wrong", "leftovers"):
            getattr(totals, kind).extend(getattr(verdict, kind))
            found += getattr(verdict, kind)
        for sentence in found:
            print(f"{when}: {sentence}; {processes.describe()}", flush=True)
        if found:
            print(output.read_text(errors="replace")[-6000:], flush=True)

    try:
        for attempt in range(1, num_kills + 1):
            if time.monotonic() - began > max_secs:
                break
            processes = begin(attempt, torture_hosts.ENDLESS)
            victim = choose.randrange(num_processes)
            phase = processes.phases[victim]
            if stuck := torture_kill.wait_at_random(processes.pids[victim], phase, choose):
                failures.append(f"attempt {attempt} {stuck}")
            phases[phase.describe()] += 1
            when = f"kill {attempt}, while {phase.describe()}"
            others = [i for i in range(num_processes) if i != victim]
            processes.send(signal.SIGKILL, [victim])
            if choose.random() >= ONE:
                time.sleep(choose.choice(GAPS_SECS))
                processes.send(signal.SIGKILL, others)
            processes.wait()
            look(processes, when)
            if weakening and (totals.losses or totals.wrong):
                break  # that it is found out is all there is to see
        processes = begin(num_kills + 1, 8)
        processes.wait()
        look(processes, "at the end", is_finished=True)
    finally:
        oracle.close()
    wall_secs = time.monotonic() - began
    print(torture_kill.table(seed, phases, totals, failures, wall_secs), flush=True)
    return 1 if totals.losses or totals.wrong or totals.leftovers or failures else 0
