"""Kills a run that has a mirror, wipes its disk, and starts it again, over and over.

The mirror is a faulty bucket. Rounds end by SIGKILL, at a random moment after the start or after
the resume, or within a fetch or a copy; or by a close. Most then lose the disk; others find their
newest step damaged, here or in the mirror. Some starts meet an outage, and some runs go back to an
older step. A start must resume exactly from a step that was saved, none older than the newest one
that was reported as mirrored, unless the run went back or the mirror has the damage, and never from
nothing. It must not take minutes. Weakened, the program begins anew where it cannot fetch
("forgetful").
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gcs_server import FaultyServer
from support import PROGRAMS
from support.damage import flip_bit
from support.processes import Talking, environment

if TYPE_CHECKING:
    from torture import Torture

OLDER, DIFFERED, BROKE = "resumed from an older step", "restores that differed", "unexpected ends"
CONFLICT = "conflicts of one machine"
FINDINGS = (OLDER, DIFFERED, CONFLICT, BROKE)
WEAKENINGS = ("forgetful",)
RESUMED = "resumed exactly"
URL = "gs://bucket/mirror"
STAGES = ("fetch from the mirror", "copy to the mirror")
# A start that takes longer is killed, and is a finding.
_ENDLESS_SECS = 300.0
_MARK = re.compile(r"(?P<folder>(incoming-)?(?P<step>\d+)(-\d+)?)/commit_success\.txt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=float, default=0.1, help="share of requests with a fault")
    parser.add_argument("--wiped", type=float, default=0.6, help="share of rounds that lose a disk")
    parser.add_argument("--damaged", type=float, default=0.2, help="share that damage a step")
    parser.add_argument("--back", type=float, default=0.3, help="share of runs that go back")
    parser.add_argument("--closed", type=float, default=0.2, help="share of runs that close")
    parser.add_argument("--staged", type=float, default=0.4, help="share killed in a fetch or copy")
    parser.add_argument("--out", type=float, default=0.2, help="share of starts in an outage")
    parser.add_argument("--early", type=float, default=0.3, help="share killed from the start on")
    parser.add_argument("--kill-within", type=float, default=25.0, help="seconds, else from resume")
    parser.add_argument("--out-secs", type=float, default=4.0)


class Oracle:
    """What was saved, and the oldest step from which the run may resume.

    Each start, and each going back, has an identity. Steps of two in a row have other numbers.
    """

    def __init__(self, torture: Torture) -> None:
        self._torture = torture
        self.least = self.resumed = 0
        self.identity = 0
        self.saved: set[tuple[int, int]] = set()
        self.damaged: set[str] = set()

    def take(self, word: str, step: int, text: str) -> None:
        torture = self._torture
        match word:
            case "resumed":
                is_exact = step == 0 or (step, int(text or -1)) in self.saved
                torture.count(RESUMED if step else "began anew")
                if step < self.least:
                    torture.find({OLDER: [f"{step}, although {self.least} was mirrored"]})
                if not is_exact:
                    torture.find({DIFFERED: [f"step {step}: {text}"]})
                self.resumed = step
                self.may_lose(step)
            case "back":
                torture.count("runs that went back")
                self.identity += 1
                self.resumed = -1
                self.may_lose(step)
            case "saving":
                self.saved.add((step, self.identity))
            case "mirrored":
                torture.count("copies that were reported")
                # After the run went back, a copy of its former branch may still arrive.
                if step == self.resumed or (step, self.identity) in self.saved:
                    self.least = step
            case "refused":
                torture.count("starts that were refused", part=text.partition(":")[0])
                if text.startswith("MirrorError"):  # no second machine has trained this run
                    torture.find({CONFLICT: [text]})

    def may_lose(self, step: int) -> None:
        """Has the run resume from this step, or a newer one, from now on."""
        self.least = min(self.least, step)


def torture(torture: Torture) -> None:
    """Starts, kills and wipes so many times; the last start is left in peace."""
    given = torture.given
    directory, oracle = torture.scratch / "run", Oracle(torture)
    with contextlib.closing(FaultyServer(given.seed)) as gcs:
        for number in (*torture.rounds(), 0):
            gcs.calm()
            gcs.rate = given.rate if number else 0.0
            oracle.identity += 1
            plan = _plan(torture, oracle.identity) if number else {"identity": oracle.identity}
            words = str(directory), URL, given.weakened or "", json.dumps(plan)
            env, began = environment(1, gcs.environment()), time.monotonic()
            with Talking(PROGRAMS / "saves.py", "to_a_mirror", *words, env=env) as started:
                timers, later = _timers(torture, gcs, started) if number else ([], [])
                for timer in timers:
                    timer.start()
                most, text, has_resumed = oracle.least, "", False
                for line in started.lines:
                    if not (line.startswith('["') and line.endswith("]\n")):  # or cut by a kill
                        text = line.strip() or text
                        continue
                    word, step, text = json.loads(line)
                    oracle.take(word, step, text)
                    if word == "resumed" and not has_resumed:
                        has_resumed = True
                        for timer in later:
                            timer.start()
                    if word == "saving" and not number and step >= most + 12:
                        break
                if not number:
                    started.process.kill()
                code = started.process.wait()
            for timer in (*timers, *(later if has_resumed else ())):
                timer.cancel()
                timer.join()
            torture.count(f"ends of {'kills' if code == -signal.SIGKILL else f'code {code}'}")
            if code not in (-signal.SIGKILL, 3, 0) or (number == 0 and not has_resumed):
                torture.find({BROKE: [f"ended with {code}: {text}"]})
            if code == -signal.SIGKILL and not has_resumed:
                torture.count("killed before it had resumed")
                if time.monotonic() - began >= _ENDLESS_SECS:
                    torture.find({BROKE: [f"had not resumed after {_ENDLESS_SECS:.0f} s: {text}"]})
            if number:
                _spoil(torture, directory, gcs, oracle)


def _plan(torture: Torture, identity: int) -> dict[str, object]:
    """What a start is to do: go back or close after so many saves, be killed in some stage."""
    given, choose = torture.given, torture.choose
    torture.count("rounds")
    plan: dict[str, object] = {"identity": identity}
    if choose.random() < given.back:
        plan["back_after"] = choose.randrange(2, 12)
    if choose.random() < given.closed:
        plan["close_after"] = choose.randrange(1, 20)
    elif choose.random() < given.staged:
        plan["die_in"] = [choose.choice(STAGES), choose.randrange(1, 7), choose.uniform(0, 1.0)]
    return plan


def _timers(
    torture: Torture, gcs: FaultyServer, started: Talking
) -> tuple[list[threading.Timer], list[threading.Timer]]:
    """Timers of what happens after the start, and after the resume; a start is never endless."""
    given, choose = torture.given, torture.choose
    kill = started.process.kill  # does nothing if it has ended
    killed = threading.Timer(choose.uniform(0.5, given.kill_within), kill)
    is_early = choose.random() < given.early
    timers = [killed if is_early else threading.Timer(_ENDLESS_SECS, kill)]
    if choose.random() < given.out:
        gcs.is_out = choose.choice(["refuse", "down"])
        torture.count("starts in an outage")
        timers.append(threading.Timer(given.out_secs, setattr, (gcs, "is_out", "")))
    return timers, [] if is_early else [killed]


def _spoil(torture: Torture, directory: Path, gcs: FaultyServer, oracle: Oracle) -> None:
    """Wipes the disk after a round, or damages the newest step here or in the mirror."""
    given, choose = torture.given, torture.choose
    if choose.random() < given.damaged:
        here = sorted((int(path.name), path) for path in directory.glob("[0-9]*"))
        found = filter(None, map(_MARK.fullmatch, gcs.names(URL)))
        there = sorted((int(match["step"]), match["folder"]) for match in found)
        if choose.random() < 0.5 and len(here) > 1:
            for path in here[-1][1].glob("state/**/d/*"):
                if path.stat().st_nlink == 1:  # others are in older steps, too
                    flip_bit(path, -20)
            # The run takes the step from the mirror, if it is intact there.
            if not there or there[-1][1] in oracle.damaged:
                oracle.may_lose(here[-2][0])
            torture.count("newest steps that were damaged", part="here")
            return
        is_known = len(there) > 1 and there[-1][0] == oracle.least
        if is_known and there[-2][1] not in oracle.damaged:
            oracle.damaged.add(there[-1][1])
            folder = f"{URL.removeprefix('gs://bucket/')}/{there[-1][1]}/state/"
            for name in gcs.store.names(folder):
                if "/d/" in name:
                    content = bytearray(gcs.store.get(name))
                    content[-20] ^= 1
                    gcs.store.put(name, bytes(content))
            oracle.may_lose(there[-2][0])
            torture.count("newest steps that were damaged", part="in the mirror")
    if choose.random() < given.wiped:
        shutil.rmtree(directory, ignore_errors=True)
        torture.count("disks that were wiped")
