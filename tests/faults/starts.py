"""Starts disturbed programs, as forks of the tests' server, and watches them."""

from __future__ import annotations

import functools
import pickle
import random
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import disturbed
from disturbed import DEVICES as DEVICES
from disturbed import ENDLESS, Log, Phase, Settings, Start
from oracle import Oracle
from support import forked
from support.processes import environment

if TYPE_CHECKING:
    from torture import Torture

# Kills are timed from the start of the process; from its first save; or from when it is seen at
# something that takes a few milliseconds, which the others seldom meet.
WAYS = {"early": 0.2, "saving": 0.4, "aimed": 0.4}
EARLY_SECS, SAVING_SECS, AIMED_SECS = 1.5, 1.0, 0.004
AIMS = [
    "recovering", "linking", "committing", "setting aside", "settling", "pruning", "deleting",
    "going back",
]  # fmt: skip
PATIENCE_SECS = 3.0
HUNG, FAILED = "starts with a process that hung", "failures of the program"
# Exit codes -> how a process ended.
ENDS = {
    0: "with its work done",
    disturbed.PREEMPTED: "preempted, its step durable",
    disturbed.TOLD: "by an error of this package",
    disturbed.RAISED: "by its own exception",
    disturbed.JAX_ENDED: "by an error of JAX",
    -signal.SIGABRT: "by JAX, which ended it",
    -signal.SIGKILL: "by SIGKILL",
}
KILLED = ENDS.keys() - {0}
# Runs a function, and leaves out what an interpreter does at its end.
PROGRAM = """
import os, pickle, sys, traceback
sys.path.insert(0, sys.argv[2])
code = 1
try:
    code = pickle.load(open(sys.argv[1], "rb"))()
except BaseException:
    traceback.print_exc()
finally:
    sys.stderr.flush()
    os._exit(code)
"""


def started(program: Callable[[], int], output: Path, scratch: Path) -> forked.Process:
    """Starts a process; the function, which can be pickled, returns its exit code."""
    scratch.write_bytes(pickle.dumps(program))
    with output.open("ab") as out:
        words = "-c", PROGRAM, str(scratch), str(Path(__file__).parent)
        # The number of devices is the program's own.
        return forked.start(words, env=environment(None, {}), stdout=out, stderr=out)


def wait_for(condition: Callable[[], bool], process: forked.Process, timeout_secs: float) -> bool:
    """Whether this came to be, or the process ended, in time."""
    deadline = time.monotonic() + timeout_secs
    while not condition() and process.poll() is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class Processes:
    """The processes of one start."""

    def __init__(
        self, programs: Sequence[Callable[..., int]], output: Path, limit_secs: float
    ) -> None:
        self.phases = [Phase(output.with_name(f"phase {i}")) for i in range(len(programs))]
        output.write_bytes(b"")
        self.started = [
            started(functools.partial(program, phase), output, output.with_name(f"program {i}"))
            for i, (program, phase) in enumerate(zip(programs, self.phases, strict=True))
        ]
        self.codes: dict[int, int] = {}
        self.hung: list[int] = []
        self.longest_secs = 0.0
        self._limit_secs = limit_secs
        self._since = time.monotonic()

    def send(self, signum: int, indices: Sequence[int]) -> None:
        for index in indices:
            self.started[index].send_signal(signum)
        self._since = time.monotonic()

    def running(self) -> list[int]:
        """The processes that have not ended."""
        for index, process in enumerate(self.started):
            if index not in self.codes and (code := process.poll()) is not None:
                self.codes[index] = code
                self.longest_secs = max(self.longest_secs, time.monotonic() - self._since)
                self._since = time.monotonic()
        return [index for index in range(len(self.started)) if index not in self.codes]

    def sleep(self, secs: float) -> None:
        """Sleeps, but no longer than all processes run."""
        until = time.monotonic() + secs
        while time.monotonic() < until and self.running():
            time.sleep(0.002)

    def wait_until_saving(self) -> None:
        """Waits until all have begun a save, one has ended, or the limit is reached."""
        until = time.monotonic() + self._limit_secs
        while time.monotonic() < until and len(self.running()) == len(self.started):
            if all(phase.has_saved() for phase in self.phases):
                return
            time.sleep(0.002)

    def wait_at_random(self, index: int, choose: random.Random) -> None:
        """Waits for a random moment to kill a process; one that is stuck counts as hung."""
        process, phase, aim = self.started[index], self.phases[index], choose.choice(AIMS)
        ends = EARLY_SECS, SAVING_SECS, AIMED_SECS
        early, late, after = (choose.uniform(0, end) for end in ends)
        (way,) = choose.choices(list(WAYS), list(WAYS.values()))
        if way == "early":
            time.sleep(early)
            return
        # What is recovered from a kill before, is so before anything is saved.
        is_aimed_early = way == "aimed" and aim == "recovering"
        if not is_aimed_early and not wait_for(phase.has_saved, process, 2 * self._limit_secs):
            self.hung.append(index)
        if way == "aimed":
            wait_for(lambda: phase.describe() == aim, process, PATIENCE_SECS)
        time.sleep(after if way == "aimed" else late)

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


class Runs:
    """Runs of disturbed programs, by name, that are started and looked at again and again."""

    def __init__(
        self,
        torture: Torture,
        settings: Mapping[str, Settings],
        folders: Mapping[str, Path] | None = None,
        limit_secs: float = 60,
        can_read_local: bool = False,
    ) -> None:
        self._torture, self._settings, self._limit_secs = torture, settings, limit_secs
        self._output = torture.scratch / "output"
        folders = folders or {name: torture.scratch / name for name in settings}
        self.directories = {name: folder / "run" for name, folder in folders.items()}
        self.logs = {name: torture.scratch / f"{name} log" / "log" for name in settings}
        for path in (*folders.values(), *(log.parent for log in self.logs.values())):
            path.mkdir(parents=True, exist_ok=True)
        self._attempt = 0
        self._oracles = {
            name: Oracle(
                directory, self.logs[name], settings[name],
                can_read_local and settings[name].has_local,
            )
            for name, directory in self.directories.items()
        }  # fmt: skip

    def begin(
        self,
        name: str,
        count: int = 1,
        num_actions: int = ENDLESS,
        program: Callable[..., int] = disturbed.run,
        on_durable: Callable[[], None] | None = None,
        **start: Any,
    ) -> Processes:
        """Starts the processes of a run; ``start``: more of :class:`Start`.

        The functions ``program`` and ``on_durable`` can be pickled.
        """
        self._attempt += 1
        # After some starts that reuse frozen arrays, one writes all arrays.
        start = {"reuse": self._attempt % 4 != 0, **start}
        seed = self._torture.choose.randrange(1 << 30)
        given = Start(self._attempt, count, free_port(), seed, num_actions, **start)
        place = self.directories[name], self.logs[name], self._settings[name], given
        Log(self.logs[name])("starting", count=count)
        programs = [functools.partial(program, *place, index, on_durable) for index in range(count)]
        return Processes(programs, self._output, self._limit_secs)

    def look(
        self, name: str, processes: Processes, what: str, ends: Any, is_finished: bool = False
    ) -> None:
        """Takes in how the processes ended, and what the oracle finds."""
        torture, verdict = self._torture, self._oracles[name].inspect(is_finished)
        for row, number in verdict.counts.items():
            torture.count(row, number)
        if processes.hung:
            verdict.found[HUNG] = [f"processes {processes.hung} hung"]
        elif not set(processes.codes.values()) <= set(ends):
            verdict.found[FAILED] = [f"ended with {sorted(processes.codes.values())}"]
        if any(verdict.found.values()):
            where = f"start {self._attempt}, {what}; {processes.describe()}"
            tail = self._output.read_text(errors="replace")[-6000:]
            torture.find(verdict.found, where, "    " + tail.replace("\n", "\n    "))
