"""Saves hundreds of steps through the faulty proxy, with kills and an outage; counts losses.

    python tests/faults/torture_gcs.py --saves 500

Several processes save to prefixes of their own, are killed at random moments, and go on. Every
step's content follows from its number, so whatever is listed afterwards can be held to it, bit by
bit. Ends with 1 if anything is lost or wrong. ``--lie drop`` and ``--lie flip`` have the server
drop or damage the array data of committed steps: then it must end with 1. With ``--reuse``, every
state has an array that does not change, which saves have the service copy.
"""

from __future__ import annotations

import argparse
import concurrent.futures as futures
import dataclasses
import itertools
import logging
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gcs_proxy
import gcs_server
from independent_gcs import IndependentServer

ROOT = Path(__file__).parent.parent.parent
KEPT = 4


def main() -> int:
    """Runs the saves, then looks at what is there; 1 if it is not what was acknowledged."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--saves", type=int, default=500, help="how many saves to begin, in all")
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--rate", type=float, default=0.1, help="share of requests with a fault")
    parser.add_argument("--outage-secs", type=float, default=20.0)
    parser.add_argument("--kill-every", type=int, default=20, help="saves per kill; 0 for none")
    parser.add_argument("--kill-within", type=float, default=20.0, help="seconds after it begins")
    parser.add_argument("--lie", choices=["drop", "flip"], help="have the server lie")
    parser.add_argument("--server", choices=["patched", "independent"], default="patched")
    parser.add_argument("--reuse", action="store_true", help="take over what does not change")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="a folder for what the processes say")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        try:
            work(args.worker[0], int(args.worker[1]), reuse=args.reuse)
        except Exception as error:
            print("broken", 0, f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])
            return 1
        return 0
    server = gcs_server.GcsServer()
    proxy = gcs_proxy.FaultProxy(server, args.seed)
    if args.server == "independent":
        server.stop()
        server = proxy.server = IndependentServer(proxy.url)  # type: ignore[assignment]
    proxy.rate = args.rate
    if args.lie:
        server.spoil = liar(server, args.lie)
    began = time.monotonic()
    share = -(-args.saves // args.processes)
    runs = [
        Run(f"gs://bucket/run{i}", share, args.kill_within, args.log, args.reuse)
        for i in range(args.processes)
    ]
    threads = [
        threading.Thread(target=run.drive, args=(proxy, args.kill_every, args.seed + i))
        for i, run in enumerate(runs)
    ]
    for thread in threads:
        thread.start()
    half = args.saves // 2
    while any(t.is_alive() for t in threads):
        if args.outage_secs and sum(r.tried for r in runs) >= half:
            proxy.is_out = "refuse"
            time.sleep(args.outage_secs)
            proxy.is_out, args.outage_secs = "", 0
        time.sleep(0.5)
    for run in runs:
        if run.tried < run.share and not run.broken:
            run.broken.append(f"{run.url}: stopped after {run.tried} of {run.share} saves")
    counts = dict(proxy.counts)
    proxy.calm()
    with futures.ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda run: run.verify(proxy), runs)
        lost = [f"{r.url}/{step}" for r, steps in zip(runs, found, strict=True) for step in steps]
    print(f"saves tried            {sum(r.tried for r in runs)}")
    print(f"  durable              {sum(len(r.durable) for r in runs)}")
    print(f"  tidying up failed    {sum(len(r.untidied) for r in runs)}")
    print(f"  failed with an error {sum(len(r.failed) for r in runs)}")
    print(f"  killed on the way    {sum(r.kills for r in runs)}")
    print(f"requests               {counts.pop('requests')}")
    print(f"uploaded MB            {proxy.uploaded_bytes / 1e6:.1f}")
    print(f"copies in the bucket   {counts.pop('copies', 0)}")
    for kind, count in sorted(counts.items()):
        print(f"  {'outage' if kind == 'refuse' else kind:20} {count}")
    print(f"steps restored exactly {sum(r.exact for r in runs)}")
    print(f"restores that differed {sum(r.wrong for r in runs)}")
    print(f"lost or wrong steps    {len(lost)}")
    for line in lost:
        print(f"  {line}")
    print(f"processes that broke   {[b for r in runs for b in r.broken]}")
    for line in (line for r in runs for line in r.failed + r.untidied):
        print(f"  {line.strip()}")
    print(f"seconds                {time.monotonic() - began:.0f}")
    proxy.stop()
    server.stop()
    return 1 if lost or any(r.wrong or r.broken for r in runs) else 0


def liar(server: gcs_server.GcsServer, how: str) -> gcs_server.Spoil:
    """Every third step's array data is gone, or damaged, as soon as the step is committed.

    Not before: whoever saves reads some of it again, and would rightly not acknowledge the step.
    """
    commits = itertools.count(1)

    def spoil(name: str, content: bytes) -> bytes:
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
        return content

    return spoil


@dataclasses.dataclass
class Run:
    """One prefix, and what its processes said of it."""

    url: str
    share: int
    kill_within: float
    log: Path | None
    reuses: bool
    tried: int = 0
    kills: int = 0
    exact: int = 0
    wrong: int = 0
    durable: list[int] = dataclasses.field(default_factory=list)
    untidied: list[str] = dataclasses.field(default_factory=list)
    failed: list[str] = dataclasses.field(default_factory=list)
    broken: list[str] = dataclasses.field(default_factory=list)

    def drive(self, proxy: gcs_proxy.FaultProxy, kill_every: int, seed: int) -> None:
        """Starts processes, and kills them now and then, until all saves were tried."""
        dice = random.Random(seed)
        while self.tried < self.share and not self.broken:
            left = self.share - self.tried
            until = dice.randint(1, 2 * kill_every) if kill_every else left + 1
            self._process(proxy, left, until, dice)

    def verify(self, proxy: gcs_proxy.FaultProxy) -> list[str]:
        """Restores what is there, without faults; names acknowledged steps that are not."""
        there: dict[int, str] = {}
        process = self._start(proxy, 0)
        assert process.stdout is not None
        for line in process.stdout:
            word, step, *rest = line.split(maxsplit=2)
            there[int(step)] = " ".join([word, *rest]).strip()
        if process.wait():
            self.broken.append(f"{self.url}: the process that restores ended with an error")
        self.exact += sum(what == "exact" for what in there.values())
        return [
            *(
                f"{step}: not there"
                for step in self.durable
                if step not in there and sum(newer > step for newer in there) < KEPT
            ),
            *(f"{step}: {what}" for step, what in there.items() if what != "exact"),
        ]

    def _start(self, proxy: gcs_proxy.FaultProxy, count: int) -> subprocess.Popen[str]:
        path = f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'faults'}"
        mine = {**proxy.environment(), "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
        reuse = ["--reuse"] * self.reuses
        name = os.devnull if self.log is None else self.log / f"{self.url.rpartition('/')[2]}.log"
        with open(name, "a") as log:
            return subprocess.Popen(
                [sys.executable, __file__, "--worker", self.url, str(count), *reuse],
                env={**os.environ, **mine},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def _process(
        self, proxy: gcs_proxy.FaultProxy, count: int, until: int, dice: random.Random
    ) -> None:
        process = self._start(proxy, count)
        assert process.stdout is not None
        is_killed = False
        for line in process.stdout:
            word, step, *rest = line.split(maxsplit=2)
            if word == "saving":
                self.tried += 1
                until -= 1
                if until == 0:
                    is_killed = True
                    # A save takes some ten seconds: also while it commits, deletes, or is over.
                    threading.Timer(dice.uniform(0, self.kill_within), process.kill).start()
            elif word == "durable":
                self.durable.append(int(step))
                self.untidied += [line] if rest else []
            elif word == "failed":
                self.failed.append(line)
            elif word in ("wrong", "corrupt"):
                self.wrong += 1
            elif word == "exact":
                self.exact += 1
            elif word == "resumed" and int(step) < max(self.durable, default=0):
                self.broken.append(f"{self.url} resumed from {step}, not {self.durable[-1]}")
            elif word == "broken":
                self.broken.append(f"{self.url}: {' '.join(rest)}")
        if process.wait() == -9:
            self.kills += 1
        elif process.returncode and not is_killed:
            self.broken.append(f"{self.url} ended with {process.returncode}")


# --- a process that saves -----------------------------------------------------------------------


def work(url: str, count: int, *, reuse: bool) -> None:
    """Goes on from the newest step with so many saves; with none, restores every step there is."""
    import torchax

    torchax.enable_globally()
    from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
    from torchax_ckpt.errors import CheckpointError, DirectoryError, SaveError

    logging.basicConfig(format="%(asctime)s %(process)d %(name)s %(message)s")
    logging.getLogger("torchax_ckpt").setLevel(logging.INFO)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # every failure, with a traceback

    def say(word: str, step: int, *more: Any) -> None:
        logging.getLogger("torchax_ckpt.torture").info("%s %s %s", word, step, more)
        print(word, step, *more, flush=True)

    while True:  # as whoever starts the program again would
        try:
            rule, options = policies.LatestN(KEPT), CheckpointOptions(reuse=reuse)
            ckpt = TorchaxCheckpointer(url, preservation_policy=rule, options=options)
            steps = ckpt.all_steps()
            break
        except DirectoryError as error:
            say("unreachable", 0, " ".join(str(error).split())[:400])
    if not count:
        for step in steps:
            compare(ckpt, step, say, reuse=reuse)
        return
    start = max(steps, default=0)
    say("resumed", start)
    for step in range(start + 1, start + 1 + count):
        say("saving", step)
        try:
            ckpt.save(step, state=state(url, step, reuse=reuse), force=True)
            ckpt.wait_until_finished()
        except DirectoryError as error:  # the very first one
            say("failed", step, " ".join(str(error).split())[:400])
        except SaveError as error:
            is_durable = "is durable" in str(error)
            say("durable" if is_durable else "failed", step, " ".join(str(error).split())[:400])
        else:
            say("durable", step)
        if step % 10 == 0:
            try:
                newest = ckpt.latest_step()
                if newest is not None:
                    compare(ckpt, newest, say, reuse=reuse)
            except CheckpointError as error:  # not now, which is said so, and is no loss
                say("unreachable", step, " ".join(str(error).split())[:400])


def state(url: str, step: int, *, reuse: bool) -> dict[str, Any]:
    """What a step of a run holds."""
    import jax.numpy as jnp
    import numpy as np

    bits = np.random.default_rng([step, *url.encode()]).integers(0, 1 << 32, 3000, np.uint32)
    found = {"device": jnp.asarray(bits[:2000]), "host": bits[2000:], "step": step}
    if reuse:  # fewer bytes would not be kept apart from the others
        base = np.random.default_rng([*url.encode()]).integers(0, 1 << 32, 300_000, np.uint32)
        found["base"] = jnp.asarray(base)
    return found


def compare(ckpt: Any, step: int, say: Any, *, reuse: bool) -> None:
    """Says whether a step is, bit by bit, what was saved."""
    import numpy as np

    from torchax_ckpt.errors import DirectoryError

    try:
        found, expected = ckpt.load(step), state(ckpt.directory, step, reuse=reuse)
        same = found["step"] == step and all(
            np.asarray(found[k]).tobytes() == np.asarray(expected[k]).tobytes()
            for k in expected.keys() - {"step"}
        )
    except Exception as error:
        word = "unreachable" if isinstance(error, DirectoryError) else "corrupt"
        return say(word, step, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
    return say("exact" if same else "wrong", step)


if __name__ == "__main__":
    sys.exit(main())
