"""Saves hundreds of steps to a faulty bucket, with kills and an outage; counts losses.

Several processes (``saves.py``) save to prefixes of their own, are killed at random
moments, and go on. Whatever is listed afterwards must be what was saved, bit by bit. Weakened, the
server drops or flips the array data of committed steps.
"""

from __future__ import annotations

import argparse
import concurrent.futures as futures
import contextlib
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from gcs_server import Emulator, FaultyServer
from s3_server import FaultyS3, Moto
from support import PROGRAMS
from support.processes import Talking, environment

if TYPE_CHECKING:
    from torture import Torture

LOST, DIFFERED, BROKE = "lost or wrong steps", "restores that differed", "processes that broke"
FINDINGS = (LOST, DIFFERED, BROKE)
WEAKENINGS = ("drop", "flip")
KEPT = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--rate", type=float, default=0.1, help="share of requests with a fault")
    parser.add_argument("--outage-secs", type=float, default=20.0)
    parser.add_argument("--kill-every", type=int, default=20, help="saves per kill; 0 for none")
    parser.add_argument("--kill-within", type=float, default=20.0, help="seconds after it begins")
    parser.add_argument("--store", choices=["gs", "s3"], default="gs")
    parser.add_argument("--server", choices=["patched", "independent"], default="patched")
    parser.add_argument("--reuse", action="store_true", help="have what does not change copied")


def torture(torture: Torture) -> None:
    """Runs the saves, then looks at what is there."""
    given = torture.given
    with contextlib.ExitStack() as stack:
        kind = {"gs": FaultyServer, "s3": FaultyS3}[given.store]
        gcs = stack.enter_context(contextlib.closing(kind(given.seed)))
        if given.server == "independent":
            stack.enter_context(gcs.independent())
        gcs.rate = given.rate
        if given.weakened:
            gcs.store.spoil = liar(gcs.store, given.weakened)
        share = -(-given.count // given.processes)
        runs = [Run(torture, gcs, i, share) for i in range(given.processes)]
        threads = [threading.Thread(target=run.drive) for run in runs]
        for thread in threads:
            thread.start()
        outage_secs = given.outage_secs
        while any(thread.is_alive() for thread in threads):
            if outage_secs and sum(run.tried for run in runs) >= given.count // 2:
                gcs.is_out = "refuse"
                time.sleep(outage_secs)
                gcs.is_out, outage_secs = "", 0
            time.sleep(0.5)
        counts = dict(gcs.counts)
        torture.count("copies in the bucket", counts.pop("copies", 0))
        torture.count("uploaded MB", round(gcs.uploaded_bytes / 1e6))
        torture.count("requests", counts.pop("requests"))
        for kind, number in counts.items():
            torture.count("faults", number, "outage" if kind == "refuse" else kind)
        gcs.calm()
        with futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(Run.verify, runs))


def liar(store: Emulator | Moto, how: str) -> Callable[[str], None]:
    """Every third step's array data is gone, or damaged, as soon as the step is committed.

    Not before: whoever saves reads some of it again, and would rightly not acknowledge the step.
    """
    commits = itertools.count(1)

    def spoil(name: str) -> None:
        step, _, file = name.rpartition("/")
        if file == "commit_success.txt" and next(commits) % 3 == 0:
            for data in (n for n in store.names(f"{step}/") if "/d/" in n):
                content = store.get(data)
                store.delete(data)
                if how == "flip":
                    (damaged := bytearray(content))[len(content) // 2] ^= 1
                    store.put(data, bytes(damaged))

    return spoil


class Run:
    """One prefix, its processes, and what they said of it."""

    _starting = threading.Lock()

    def __init__(self, torture: Torture, gcs: FaultyServer, number: int, share: int) -> None:
        self.tried = 0
        self._torture, self._gcs, self._share = torture, gcs, share
        self._url = f"{torture.given.store}://bucket/run{number}"
        self._choose = random.Random(torture.given.seed + number)
        self._durable: list[int] = []
        self._is_broken = False
        self._text = ""  # the last line that no process meant for this torture, as of an error

    def drive(self) -> None:
        """Starts processes, and kills them now and then, until all saves were tried."""
        every = self._torture.given.kill_every
        while self.tried < self._share and not self._is_broken:
            left = self._share - self.tried
            self._go_on(left, self._choose.randint(1, 2 * every) if every else left + 1)

    def _go_on(self, count: int, until: int) -> None:
        """Has a process save so often, and kills it some time after one of its saves began."""
        torture, is_saving, timer = self._torture, False, None
        with self._started(count) as started:
            for word, step, text in self._said(started):
                is_saving = word == "saving" or (is_saving and word not in ("durable", "failed"))
                match word:
                    case "saving":
                        self.tried += 1
                        torture.count("saves tried")
                        until -= 1
                        if until == 0:
                            # A save takes seconds: also while it commits, deletes, or is over.
                            secs = self._choose.uniform(0, torture.given.kill_within)
                            kill = started.process.pid, signal.SIGKILL
                            (timer := threading.Timer(secs, os.kill, kill)).start()
                    case "durable":
                        self._durable.append(step)
                        torture.count("saves that ended", part="durable")
                        torture.count("tidying up failed", bool(text))
                    case "failed":
                        torture.count("saves that ended", part="failed with an error")
                        print(f"{self._url}/{step} failed: {text}")
                    case "wrong" | "corrupt":
                        torture.find({DIFFERED: [f"{step}: {word} {text}"]}, self._url)
                    case "exact":
                        torture.count("steps restored exactly")
                    case "resumed" if step < max(self._durable, default=0):
                        self._break(f"resumed from {step}, not {self._durable[-1]}")
            if timer is not None:
                timer.cancel()
                timer.join()
            code = started.process.wait()
        if code == -signal.SIGKILL:
            torture.count("saves that ended", is_saving, part="killed on the way")
        elif code:
            self._break(f"ended with {code}: {self._text}")

    def verify(self) -> None:
        """Restores what is there, without faults; looks for acknowledged steps that are not."""
        if self.tried < self._share and not self._is_broken:
            self._break(f"stopped after {self.tried} of {self._share} saves")
        with self._started(0) as started:
            there = {step: f"{word} {text}".strip() for word, step, text in self._said(started)}
            code = started.process.wait()
        if code:
            self._break(f"the process that restores ended with {code}: {self._text}")
        exact = [step for step, what in there.items() if what == "exact"]
        self._torture.count("steps restored exactly", len(exact))
        lost = [f"{step}: {what}" for step, what in there.items() if step not in exact]
        lost += [
            f"{step}: not there"
            for step in self._durable
            if step not in there and sum(newer > step for newer in there) < KEPT
        ]
        self._torture.find({LOST: lost}, self._url)

    def _break(self, text: str) -> None:
        self._is_broken = True
        self._torture.find({BROKE: [text]}, self._url)

    def _started(self, count: int) -> Talking:
        words = PROGRAMS / "saves.py", "to_a_faulty_bucket", self._url, str(count), str(KEPT)
        reuse = ["reuse"] * self._torture.given.reuse
        with self._starting:
            return Talking(*words, *reuse, env=environment(1, self._gcs.environment()))

    def _said(self, started: Talking) -> Iterator[tuple[str, int, str]]:
        """Word, step and text of each line of a process."""
        for line in started.lines:
            if line.startswith('["'):
                yield tuple(json.loads(line))
            else:
                self._text = line.strip()
