"""Saves hundreds of steps through the faulty proxy, with kills and an outage; counts losses.

Several processes save to prefixes of their own, are killed at random moments, and go on. Every
step's content follows from its number, so whatever is listed afterwards can be held to it, bit by
bit. Weakened, the server drops or flips the array data of committed steps.
"""

from __future__ import annotations

import argparse
import concurrent.futures as futures
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gcs_proxy
import gcs_server

if TYPE_CHECKING:
    from torture import Torture

LOST, DIFFERED, BROKE = "lost or wrong steps", "restores that differed", "processes that broke"
FINDINGS = (LOST, DIFFERED, BROKE)
WEAKENINGS = ("drop", "flip")
ROOT = Path(__file__).parents[2]
KEPT = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--rate", type=float, default=0.1, help="share of requests with a fault")
    parser.add_argument("--outage-secs", type=float, default=20.0)
    parser.add_argument("--kill-every", type=int, default=20, help="saves per kill; 0 for none")
    parser.add_argument("--kill-within", type=float, default=20.0, help="seconds after it begins")
    parser.add_argument("--server", choices=["patched", "independent"], default="patched")
    parser.add_argument("--reuse", action="store_true", help="have what does not change copied")


def torture(torture: Torture) -> None:
    """Runs the saves, then looks at what is there."""
    given = torture.given
    with gcs_proxy.serving(given.server, given.seed) as proxy:
        proxy.rate = given.rate
        if given.weakened:
            proxy.server.spoil = liar(proxy.server, given.weakened)
        share = -(-given.count // given.processes)
        runs = [Run(torture, proxy, i, share) for i in range(given.processes)]
        threads = [threading.Thread(target=run.drive) for run in runs]
        for thread in threads:
            thread.start()
        outage_secs = given.outage_secs
        while any(thread.is_alive() for thread in threads):
            if outage_secs and sum(run.tried for run in runs) >= given.count // 2:
                proxy.is_out = "refuse"
                time.sleep(outage_secs)
                proxy.is_out, outage_secs = "", 0
            time.sleep(0.5)
        counts = dict(proxy.counts)
        torture.count("copies in the bucket", counts.pop("copies", 0))
        torture.count("uploaded MB", round(proxy.uploaded_bytes / 1e6))
        torture.count("requests", counts.pop("requests"))
        for kind, number in counts.items():
            torture.count("faults", number, "outage" if kind == "refuse" else kind)
        proxy.calm()
        with futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(Run.verify, runs))


def liar(server: gcs_server.GcsServer, how: str) -> Callable[[str], None]:
    """Every third step's array data is gone, or damaged, as soon as the step is committed.

    Not before: whoever saves reads some of it again, and would rightly not acknowledge the step.
    """
    commits = itertools.count(1)

    def spoil(name: str) -> None:
        step, _, file = name.rpartition("/")
        if file == "commit_success.txt" and next(commits) % 3 == 0:
            for data in (n for n in server.names(f"{step}/") if "/d/" in n):
                found = server.storage.get_file_obj("bucket", data)
                was = server.storage.get_file("bucket", data)
                server.storage.delete_file("bucket", data)
                if how == "flip":
                    middle = len(was) // 2
                    now = was[:middle] + bytes([was[middle] ^ 1]) + was[middle + 1 :]
                    server.storage.create_file("bucket", data, now, found)

    return spoil


class Run:
    """One prefix, its processes, and what they said of it."""

    def __init__(
        self, torture: Torture, proxy: gcs_proxy.FaultProxy, number: int, share: int
    ) -> None:
        self.tried = 0
        self._torture, self._proxy, self._share = torture, proxy, share
        self._url = f"gs://bucket/run{number}"
        self._choose = random.Random(torture.given.seed + number)
        self._durable: list[int] = []
        self._is_broken = False

    def drive(self) -> None:
        """Starts processes, and kills them now and then, until all saves were tried."""
        every = self._torture.given.kill_every
        while self.tried < self._share and not self._is_broken:
            left = self._share - self.tried
            self._go_on(left, self._choose.randint(1, 2 * every) if every else left + 1)

    def _go_on(self, count: int, until: int) -> None:
        """Has a process save so often, and kills it some time after one of its saves began."""
        torture, is_killed, is_saving = self._torture, False, False
        with self._started(count) as process:
            for word, step, text in _said(process):
                is_saving = word == "saving" or (is_saving and word not in ("durable", "failed"))
                match word:
                    case "saving":
                        self.tried += 1
                        torture.count("saves tried")
                        until -= 1
                        if until == 0:
                            is_killed = True
                            # A save takes seconds: also while it commits, deletes, or is over.
                            secs = self._choose.uniform(0, torture.given.kill_within)
                            threading.Timer(secs, process.kill).start()
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
                    case "broken":
                        self._break(text)
        if process.returncode == -9:
            torture.count("saves that ended", is_saving, part="killed on the way")
        elif process.returncode and not is_killed:
            self._break(f"ended with {process.returncode}")

    def verify(self) -> None:
        """Restores what is there, without faults; looks for acknowledged steps that are not."""
        if self.tried < self._share and not self._is_broken:
            self._break(f"stopped after {self.tried} of {self._share} saves")
        with self._started(0) as process:
            there = {step: f"{word} {text}".strip() for word, step, text in _said(process)}
        if process.returncode:
            self._break("the process that restores ended with an error")
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

    def _started(self, count: int) -> subprocess.Popen[str]:
        given = self._torture.given
        path = f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'faults'}"
        return subprocess.Popen(
            [sys.executable, __file__, self._url, str(count), *["reuse"] * given.reuse],
            env={**os.environ, **self._proxy.environment(), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )


def _said(process: subprocess.Popen[str]) -> Iterator[tuple[str, int, str]]:
    """Word, step and text of each line of a process."""
    assert process.stdout is not None
    for line in process.stdout:
        word, step, *rest = line.split(maxsplit=2)
        yield word, int(step), " ".join(rest).strip()


# --- a process that saves -----------------------------------------------------------------------

Say = Callable[..., None]


def work(url: str, count: int, reuse: bool) -> None:
    """Goes on from the newest step with so many saves; with none, restores every step there is."""
    import torchax

    torchax.enable_globally()
    from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
    from torchax_ckpt.errors import CheckpointError, DirectoryError, SaveError
    from torchax_ckpt.storage.writing import fetching

    def say(word: str, step: int, text: Any = "") -> None:
        print(" ".join(f"{word} {step} {text}".split())[:400], flush=True)

    while True:  # as whoever starts the program again would
        try:
            rule, options = policies.LatestN(KEPT), CheckpointOptions(reuse=reuse)
            ckpt = TorchaxCheckpointer(url, preservation_policy=rule, options=options)
            steps = ckpt.all_steps()
            break
        except DirectoryError as error:
            say("unreachable", 0, error)
    if not count:
        for step in steps:
            compare(ckpt, step, say, reuse)
        return
    start = max(steps, default=0)
    say("resumed", start)
    if int(url[-1]) % 2:
        fetching.STACK_BYTES = 1
    for step in range(start + 1, start + 1 + count):
        say("saving", step)
        try:
            ckpt.save(step, state=state(url, step, reuse), force=True)
            ckpt.wait_until_finished()
            say("durable", step)
        except DirectoryError as error:  # the very first one
            say("failed", step, error)
        except SaveError as error:
            say("durable" if "is durable" in str(error) else "failed", step, error)
        if step % 10 == 0:
            try:
                if (newest := ckpt.latest_step()) is not None:
                    compare(ckpt, newest, say, reuse)
            except CheckpointError as error:  # not now, which is said so, and is no loss
                say("unreachable", step, error)


def state(url: str, step: int, reuse: bool) -> dict[str, Any]:
    """What a step of a run holds."""
    import jax.numpy as jnp
    import numpy as np

    bits = np.random.default_rng([step, *url.encode()]).integers(0, 1 << 32, 3000, np.uint32)
    found = {"device": jnp.asarray(bits[:1500]), "host": bits[1500:2400], "step": step}
    # Three stacks, which odd runs write in a batch each, but in the first save of a process.
    found |= {
        f"layers{i // 2}.{i % 2}": jnp.asarray(bits[-100 * (i + 1) :][:100]) for i in range(6)
    }
    if reuse:  # fewer bytes would not be kept apart from the others
        base = np.random.default_rng([*url.encode()]).integers(0, 1 << 32, 300_000, np.uint32)
        found["base"] = jnp.asarray(base)
    return found


def compare(ckpt: Any, step: int, say: Say, reuse: bool) -> None:
    """Says whether a step is, bit by bit, what was saved."""
    import numpy as np

    from torchax_ckpt.errors import DirectoryError

    try:
        found, expected = ckpt.load(step), state(ckpt.directory, step, reuse)
        same = found["step"] == step and all(
            np.asarray(found[k]).tobytes() == np.asarray(expected[k]).tobytes()
            for k in expected.keys() - {"step"}
        )
    except Exception as error:
        word = "unreachable" if isinstance(error, DirectoryError) else "corrupt"
        return say(word, step, f"{type(error).__name__}: {error}")
    return say("exact" if same else "wrong", step)


if __name__ == "__main__":
    try:
        work(sys.argv[1], int(sys.argv[2]), "reuse" in sys.argv)
    except Exception as error:
        print("broken", 0, f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])
        sys.exit(1)
