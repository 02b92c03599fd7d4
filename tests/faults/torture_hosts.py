"""Disturbs runs of one to four processes at random, and looks at what the next start restores.

    python tests/faults/torture_hosts.py --rounds 200

In each round the processes of a run (``hosts_run.py``) train, save, prune and go back, with a local
tier on each of them or without; then something happens to one of them or to all. Each round is
followed by one with another number of processes on the same directories, and many of those with
a local tier first by a start with as many: only these can restore local steps. The oracle checks
every shard that each process restored, and restores every durable step itself.

The processes wait for each other for ``--process-secs``, JAX for ``--heartbeat-secs`` and, at a
start, for ``--start-secs``. However one ends, each other process must end by itself within
``--limit-secs`` of that, of the disturbance or of the start, whichever is last; else it hangs.

Exit code 1 if a durable step was lost, a state was wrong, a process hung, leftovers piled up, or a
program failed that nothing kept from its end.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # it would start threads when imported

import argparse
import collections
import dataclasses
import functools
import logging
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hosts_run
from hosts_run import DEATHS, PREEMPTED, Bounds, HostsOracle, Start
from killed_run import Log, Phase, Verdict
from torture_kill import Asked, fork, has_ended, preload

# What happens in a round -> how often.
KINDS = {
    "SIGKILL to one": 4,
    "SIGKILL to all": 4,
    "SIGSTOP of one for a second": 2,
    "SIGSTOP of one until the others end": 2,
    "SIGTERM to one": 3,
    "SIGTERM to all": 2,
    "exception in one": 2,
    "other calls in one": 3,
    "death in a function": 6,
    "clock of one wrong": 1,
    "nothing": 1,
}
# After these every process ends as if nothing had happened, or as preempted.
HARMLESS = (
    "SIGSTOP of one for a second",
    "SIGTERM to one",
    "SIGTERM to all",
    "clock of one wrong",
    "nothing",
)
# Exit codes -> how a process ended.
ENDS = {
    0: "with its work done",
    hosts_run.PREEMPTED: "preempted, its step durable",
    hosts_run.TOLD: "by an error of this package",
    hosts_run.RAISED: "by its own exception",
    hosts_run.JAX_ENDED: "by an error of JAX",
    -signal.SIGABRT: "by JAX, which ended it",
    -signal.SIGKILL: "by SIGKILL",
}
ENDLESS = 1000  # actions
EARLY_SECS, SAVING_SECS = 2.0, 2.5


class Processes:
    """The processes of one start.

    Args:
      directory, log_path, output: of the run.
      start: what they do.
      limit_secs: how long one may take after anything that happens.
    """

    def __init__(
        self, directory: Path, log_path: Path, output: Path, start: Start, limit_secs: float
    ) -> None:
        self.phases = [Phase() for _ in range(start.count)]
        output.write_bytes(b"")
        self.pids = [
            fork(
                functools.partial(
                    hosts_run.run, directory, log_path, output, self.phases[index], index, start
                )
            )
            for index in range(start.count)
        ]
        self.codes: dict[int, int] = {}
        self.hung: list[int] = []
        self.longest_secs = 0.0
        self._limit_secs = limit_secs
        self._since = time.monotonic()

    def send(self, signum: int, indices: Sequence[int]) -> None:
        for index in indices:
            if index not in self.codes and not has_ended(self.pids[index]):
                os.kill(self.pids[index], signum)
        self._since = time.monotonic()

    def running(self) -> list[int]:
        """The processes that have not ended."""
        for index, pid in enumerate(self.pids):
            if index not in self.codes and has_ended(pid):
                self.codes[index] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                self.longest_secs = max(self.longest_secs, time.monotonic() - self._since)
                self._since = time.monotonic()
        return [index for index in range(len(self.pids)) if index not in self.codes]

    def sleep(self, secs: float) -> None:
        """Sleeps, but no longer than all processes run."""
        until = time.monotonic() + secs
        while time.monotonic() < until and self.running():
            time.sleep(0.002)

    def wait_until_saving(self, indices: Sequence[int]) -> None:
        """Waits until all of these have begun a save, one has ended, or the limit is reached."""
        until = time.monotonic() + self._limit_secs
        while time.monotonic() < until and len(self.running()) == len(self.pids):
            if all(self.phases[index].has_saved() for index in indices):
                return
            time.sleep(0.002)

    def wait(self, *, but: Sequence[int] = ()) -> None:
        """Waits for all processes but some; those that hang write their stacks and are killed."""
        while left := [index for index in self.running() if index not in but]:
            if time.monotonic() - self._since > self._limit_secs:
                self.hung += left
                self.send(signal.SIGUSR1, left)
                time.sleep(0.5)
                self.send(signal.SIGKILL, left)
            time.sleep(0.002)

    def describe(self) -> str:
        phases = ", ".join(phase.describe() for phase in self.phases)
        return f"phases {phases}; exit codes {[self.codes[i] for i in sorted(self.codes)]}"


@dataclasses.dataclass
class Found:
    """What the rounds showed.

    Attributes:
      rounds: what happened -> how often; starts: number of processes and tiers -> how often.
      ends: how processes ended -> how often.
      verdict: of the oracle.
      hung, failures: sentences.
      longest_secs: from something that happened until a process ended by itself.
    """

    rounds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    starts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    ends: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    verdict: Verdict = dataclasses.field(default_factory=Verdict)
    hung: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    longest_secs: float = 0.0

    @property
    def is_bad(self) -> bool:
        verdict = self.verdict
        return bool(
            verdict.losses or verdict.wrong or verdict.leftovers or self.hung or self.failures
        )


class Torture:
    """Rounds on one directory with local tiers, and on one without.

    Args:
      choose: the source of all chance.
      bounds, limit_secs: how long processes may wait and take.
      weakening: one of ``hosts_run.WEAKENINGS``.
      kinds: what may happen, of ``KINDS``.
      scratch: a folder.
    """

    def __init__(
        self,
        choose: random.Random,
        bounds: Bounds,
        limit_secs: float,
        weakening: str | None,
        kinds: Sequence[str],
        scratch: Path,
    ) -> None:
        self.found = Found()
        self._kinds = {kind: KINDS[kind] for kind in kinds}
        self._choose, self._bounds, self._limit_secs = choose, bounds, limit_secs
        self._weakening = weakening
        self._scratch = scratch
        self._places = {name: scratch / name / "run" for name in ("one tier", "two tiers")}
        for place in self._places.values():
            place.parent.mkdir()
        self._logs = {name: scratch / f"{name}.log" for name in self._places}
        self._oracles = Asked(
            {
                name: functools.partial(HostsOracle, place, self._logs[name])
                for name, place in self._places.items()
            }
        )
        self._attempt = 0
        self._counts = dict.fromkeys(self._places, 0)

    def close(self) -> None:
        self._oracles.close()

    def round(self) -> None:
        """Starts, disturbs, looks."""
        choose = self._choose
        (kind,) = choose.choices(list(self._kinds), list(self._kinds.values()))
        name = "two tiers" if choose.random() < 0.6 else "one tier"
        count = choose.choice([n for n in (1, 2, 3, 4) if n != self._counts[name]])
        if count == 1 and kind in ("other calls in one", "SIGSTOP of one until the others end"):
            kind = "exception in one"
        self._counts[name] = count
        culprit = choose.randrange(count)
        trouble: dict[str, Any] = {}
        match kind:
            case "exception in one":
                trouble["raise"] = choose.randrange(1, 8)
            case "other calls in one":
                trouble["differ"] = choose.randrange(1, 8)
            case "clock of one wrong":
                trouble["skew"] = choose.choice((-3600, 3600, 86_400))
            case "death in a function":
                function = choose.choice(list(DEATHS))
                number = choose.randint(1, DEATHS[function][2])
                trouble["die"] = function, number, choose.choice(("before", "after"))
        is_disturbed_from_here = kind.startswith("SIG")
        num_actions = ENDLESS if is_disturbed_from_here else choose.randint(6, 14)
        if kind == "SIGSTOP of one for a second":
            num_actions = 40
        start = self._start(name, count, num_actions, culprit, trouble)
        processes = self._begin(name, start)
        self._disturb(processes, kind, culprit)
        processes.wait()
        what = f"{kind} ({count} processes, {name}, {culprit=} {trouble})"
        self.found.rounds[kind] += 1
        self._look(name, processes, kind, what)
        if name != "two tiers":
            return
        lost = self._lose(name, count)
        self.found.rounds.update(lost)
        if choose.random() < 0.6:
            look = self._start(name, count, 2, 0, {})
            processes = self._begin(name, look)
            processes.wait()
            self._look(name, processes, "nothing", f"a start after {lost} after {what}")

    def last(self) -> None:
        """Goes on once more with each directory, undisturbed."""
        for name in self._places:
            processes = self._begin(name, self._start(name, 2, 8, 0, {}))
            processes.wait()
            self._look(name, processes, "nothing", f"the last start ({name})", is_finished=True)

    def _start(
        self, name: str, count: int, num_actions: int, culprit: int, trouble: dict[str, Any]
    ) -> Start:
        self._attempt += 1
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        bounds = Bounds(600, 600, 600) if self._weakening == "patient" else self._bounds
        return Start(
            self._attempt,
            count,
            port,
            name == "two tiers",
            self._choose.randrange(1 << 30),
            num_actions,
            bounds,
            culprit,
            trouble,
            self._weakening,
        )

    def _begin(self, name: str, start: Start) -> Processes:
        self.found.starts[f"{start.count} processes, {name}"] += 1
        Log(self._logs[name])("starting", count=start.count, has_local=start.has_local)
        output = self._scratch / "output"
        return Processes(self._places[name], self._logs[name], output, start, self._limit_secs)

    def _disturb(self, processes: Processes, kind: str, culprit: int) -> None:
        choose = self._choose
        count = len(processes.pids)
        early, late = choose.uniform(0, EARLY_SECS), choose.uniform(0, SAVING_SECS)
        is_early = choose.random() < 0.2
        order = choose.sample(range(count), count)
        gaps = [choose.choice((0, 0, 0.005, 0.1)) for _ in order]
        if not kind.startswith("SIG"):
            return
        # A SIGTERM before JAX listens to it ends a process as any signal does.
        if is_early and kind.startswith("SIGKILL"):
            processes.sleep(early)
        else:
            processes.wait_until_saving(range(count))
            processes.sleep(late)
        match kind:
            case "SIGKILL to one":
                processes.send(signal.SIGKILL, [culprit])
            case "SIGKILL to all" | "SIGTERM to all":
                for index, gap in zip(order, gaps, strict=True):
                    is_kill = kind == "SIGKILL to all"
                    processes.send(signal.SIGKILL if is_kill else signal.SIGTERM, [index])
                    time.sleep(gap)
            case "SIGTERM to one":
                processes.send(signal.SIGTERM, [culprit])
            case _:
                processes.send(signal.SIGSTOP, [culprit])
                if kind == "SIGSTOP of one for a second":
                    processes.sleep(1)
                else:
                    processes.wait(but=[culprit])
                processes.send(signal.SIGCONT, [culprit])

    def _lose(self, name: str, count: int) -> list[str]:
        """Wipes or swaps local directories, while nobody runs; returns what was done."""
        choose, root = self._choose, self._places[name].with_name("local")
        places = list(range(count))
        done = []
        log = Log(self._logs[name])
        if choose.random() < 0.3:
            place = choose.choice(places)
            shutil.rmtree(root / str(place), ignore_errors=True)
            log("wiped", place=place)
            done.append("a local directory wiped")
        if count > 1 and choose.random() < 0.3:
            order = choose.sample(places, count)
            for place in places:
                if (root / str(place)).exists():
                    (root / str(place)).rename(root / f"of {place}")
            for now, before in enumerate(order):
                if (root / f"of {before}").exists():
                    (root / f"of {before}").rename(root / str(now))
            log("swapped", places=order)
            done.append("local directories swapped")
        return done

    def _look(
        self, name: str, processes: Processes, kind: str, what: str, is_finished: bool = False
    ) -> None:
        """Takes in how the processes ended, and what the oracle finds."""
        found = self.found
        found.longest_secs = max(found.longest_secs, processes.longest_secs)
        sentences = []
        if processes.hung:
            found.hung.append(f"processes {processes.hung} hung")
            sentences.append(found.hung[-1])
        ended = set(processes.codes.values())
        found.ends.update(ENDS.get(code, f"with {code}") for code in processes.codes.values())
        allowed = {0, PREEMPTED} if kind in HARMLESS else ENDS.keys()
        if not processes.hung and not ended <= allowed:
            found.failures.append(f"ended with {sorted(ended)}")
            sentences.append(found.failures[-1])
        verdict = self._oracles.inspect(name, is_finished)
        found.verdict.num_states += verdict.num_states
        for group in ("losses", "wrong", "leftovers"):
            getattr(found.verdict, group).extend(getattr(verdict, group))
            sentences += getattr(verdict, group)
        if sentences:
            print(f"start {self._attempt}, {what}; {processes.describe()}", flush=True)
            for sentence in sentences[:8]:
                print(f"  {sentence}", flush=True)
            tail = (self._scratch / "output").read_text(errors="replace")[-6000:]
            print("    " + tail.replace("\n", "\n    "), flush=True)


def table(found: Found, seed: int, wall_secs: float) -> str:
    """What happened, for people."""
    verdict = found.verdict
    num_rounds = sum(found.rounds[kind] for kind in KINDS)
    rows = [
        ("rounds", num_rounds),
        *((f"  {kind}", found.rounds[kind]) for kind in KINDS if found.rounds[kind]),
        *((f"then {k}", n) for k, n in sorted(found.rounds.items()) if k not in KINDS),
        ("starts", found.starts.total()),
        *((f"  {kind}", count) for kind, count in sorted(found.starts.items())),
        ("processes", found.ends.total()),
        *((f"  ended {how}", count) for how, count in found.ends.most_common()),
        ("states restored and compared", verdict.num_states),
        ("durable steps lost", len(verdict.losses)),
        ("wrong or failed restores", len(verdict.wrong)),
        ("starts with a process that hung", len(found.hung)),
        ("times leftovers piled up", len(verdict.leftovers)),
        ("failures of the program", len(found.failures)),
        ("longest wait for an end, in seconds", round(found.longest_secs)),
        ("seed", seed),
        ("seconds", round(wall_secs)),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value:>6}" for name, value in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then start no more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--process-secs", type=float, default=5)
    parser.add_argument("--heartbeat-secs", type=int, default=10)
    parser.add_argument("--start-secs", type=int, default=20)
    parser.add_argument("--limit-secs", type=float, default=60)
    parser.add_argument("--weakened", choices=hosts_run.WEAKENINGS, help="must be found out")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--verbose", action="store_true", help="print what each round adds")
    given = parser.parse_args()
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    began = time.monotonic()
    bounds = Bounds(given.process_secs, given.heartbeat_secs, given.start_secs)
    with tempfile.TemporaryDirectory() as scratch:
        preload()
        torture = Torture(
            random.Random(given.seed),
            bounds,
            given.limit_secs,
            given.weakened,
            given.kinds,
            Path(scratch),
        )
        try:
            for number in range(given.rounds):
                if number and time.monotonic() - began > given.seconds:
                    break
                torture.round()
                if given.verbose:
                    found = torture.found
                    print(found.rounds.total(), found.ends, round(found.longest_secs), flush=True)
                if given.weakened and torture.found.is_bad:
                    break  # that it is found out is all there is to see
            if not given.weakened:
                torture.last()
        finally:
            torture.close()
    print(table(torture.found, given.seed, time.monotonic() - began), flush=True)
    return 1 if torture.found.is_bad else 0


if __name__ == "__main__":
    sys.exit(main())
