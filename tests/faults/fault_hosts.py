"""Disturbs runs of one to four processes at random, and looks at what the next start restores.

In each round the processes (``disturbed.py``) train, save, prune and go back, with a local tier on
each of them or without; then something happens to one of them or to all. Each round is followed by
one with another number of processes on the same directories, and many of those with a local tier
first by a start with as many: only these can restore local steps. The oracle checks every shard
that each process restored, and restores every durable step itself.

The processes wait for each other for ``--process-secs``, JAX for ``--heartbeat-secs`` and, at a
start, for ``--start-secs``. However one ends, each other process must end by itself within
``--limit-secs`` of that, of the disturbance or of the start, whichever is last; else it hangs.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

from disturbed import DEATHS, PREEMPTED, Log, Settings
from oracle import LEFT, LOST, WRONG
from starts import ENDLESS, ENDS, FAILED, HUNG, Processes, Runs

if TYPE_CHECKING:
    from torture import Torture

FINDINGS = (LOST, WRONG, HUNG, LEFT, FAILED)
# Also: the bounds are ten minutes.
WEAKENINGS = ("mixed", "delete-first", "delete-local-first", "patient")
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
HARMLESS = ("SIGSTOP of one for a second", "SIGTERM to one", "SIGTERM to all", "clock of one wrong")
EARLY_SECS, SAVING_SECS = 2.0, 2.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--process-secs", type=float, default=5)
    parser.add_argument("--heartbeat-secs", type=int, default=10)
    parser.add_argument("--start-secs", type=int, default=20)
    parser.add_argument("--limit-secs", type=float, default=60)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=list(KINDS))


def torture(torture: Torture) -> None:
    """Disturbs so often, in turn on a directory with local tiers and on one without."""
    hosts = Hosts(torture)
    for _ in torture.rounds():
        hosts.round()
    if not torture.given.weakened:
        for name in hosts.settings:
            hosts.go(name, 2, 8, "nothing", "the last start", is_finished=True)
    torture.count("longest wait for an end, in seconds", round(hosts.longest_secs))


class Hosts:
    """Runs on one directory with local tiers, and on one without."""

    def __init__(self, torture: Torture) -> None:
        given = torture.given
        secs = (given.process_secs, given.heartbeat_secs, given.start_secs)
        bounds = (600, 600, 600) if given.weakened == "patient" else secs
        names = ("process_secs", "heartbeat_secs", "start_secs")
        one = Settings(
            every=3, forced=0.25, back=0.15, delete=0, **dict(zip(names, bounds, strict=True))
        )
        self.settings = {"one tier": one, "two tiers": dataclasses.replace(one, has_local=True)}
        self.runs = Runs(torture, self.settings, limit_secs=given.limit_secs)
        self.longest_secs = 0.0
        self._torture = torture
        self._counts = dict.fromkeys(self.settings, 0)

    def round(self) -> None:
        """Starts, disturbs, looks; then wipes or swaps local directories, and may look again."""
        torture, choose = self._torture, self._torture.choose
        kinds = {kind: KINDS[kind] for kind in torture.given.only}
        (kind,) = choose.choices(list(kinds), list(kinds.values()))
        # What local tiers lose shows only at another start with as many processes.
        is_local = torture.given.weakened == "delete-local-first"
        name = "two tiers" if is_local or choose.random() < 0.6 else "one tier"
        count = choose.choice([n for n in (1, 2, 3, 4) if n != self._counts[name]])
        if count == 1 and kind in ("other calls in one", "SIGSTOP of one until the others end"):
            kind = "exception in one"
        self._counts[name] = count
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
                number = choose.randint(1, DEATHS[function])
                trouble["die"] = function, number, choose.choice(("before", "after"))
        num_actions = ENDLESS if kind.startswith("SIG") else choose.randint(6, 14)
        if kind == "SIGSTOP of one for a second":
            num_actions = 40
        torture.count("rounds", part=kind)
        culprit = choose.randrange(count)
        what = f"{kind} ({count} processes, {name}, {culprit=} {trouble})"
        self.go(name, count, num_actions, kind, what, culprit=culprit, trouble=trouble)
        if name == "two tiers":
            lost = self._lose(count)
            if is_local or choose.random() < 0.6:
                self.go(name, count, 2, "nothing", f"a start after {lost} after {what}")

    def go(
        self,
        name: str,
        count: int,
        num_actions: int,
        kind: str,
        what: str,
        is_finished: bool = False,
        culprit: int = 0,
        **start: Any,
    ) -> None:
        """Starts processes, disturbs them, and looks."""
        torture = self._torture
        torture.count("starts", part=f"{count} processes, {name}")
        processes = self.runs.begin(
            name,
            count,
            num_actions,
            weakening=torture.given.weakened,
            reuse=torture.choose.random() < 0.5,
            culprit=culprit,
            **start,
        )
        self._disturb(processes, kind, culprit)
        processes.wait()
        for code in processes.codes.values():
            torture.count("processes", part=f"ended {ENDS.get(code, f'with {code}')}")
        self.longest_secs = max(self.longest_secs, processes.longest_secs)
        ends = (0, PREEMPTED) if kind in (*HARMLESS, "nothing") else ENDS
        self.runs.look(name, processes, what, ends, is_finished)

    def _disturb(self, processes: Processes, kind: str, culprit: int) -> None:
        if not kind.startswith("SIG"):
            return
        choose = self._torture.choose
        # A SIGTERM before JAX listens to it ends a process as any signal does.
        if choose.random() < 0.2 and kind.startswith("SIGKILL"):
            processes.sleep(choose.uniform(0, EARLY_SECS))
        else:
            processes.wait_until_saving()
            processes.sleep(choose.uniform(0, SAVING_SECS))
        signum = getattr(signal, kind.split()[0])
        if kind.endswith("to all"):
            count = len(processes.started)
            for index in choose.sample(range(count), count):
                processes.send(signum, [index])
                time.sleep(choose.choice((0, 0, 0.005, 0.1)))
            return
        processes.send(signum, [culprit])
        if signum == signal.SIGSTOP:
            if kind == "SIGSTOP of one for a second":
                processes.sleep(1)
            else:
                processes.wait(but=[culprit])
            processes.send(signal.SIGCONT, [culprit])

    def _lose(self, count: int) -> list[str]:
        """Wipes or swaps local directories, while nobody runs; returns what was done."""
        choose, log = self._torture.choose, Log(self.runs.logs["two tiers"])
        root = self.runs.directories["two tiers"].with_name("local")
        places = list(range(count))
        done = []
        if choose.random() < 0.3:
            place = choose.choice(places)
            shutil.rmtree(root / str(place), ignore_errors=True)
            log("wiped", place=place)
            done.append("then a local directory wiped")
        if count > 1 and choose.random() < 0.3:
            order = choose.sample(places, count)
            for place in filter(lambda place: (root / str(place)).exists(), places):
                (root / str(place)).rename(root / f"of {place}")
            for now, before in enumerate(order):
                if (root / f"of {before}").exists():
                    (root / f"of {before}").rename(root / str(now))
            log("swapped", places=order)
            done.append("then local directories swapped")
        for row in done:
            self._torture.count(row)
        return done
