"""Cuts the power of a training program at random moments, and looks at what the disk had.

The program (``disturbed.py``), or the commands ``copy`` and ``export``, write to a file system in
user space that knows what was synced (``power_disk.py``). A cut kills the program, and leaves of
everything that was not synced what chance says. The oracle then restores every step there is; the
program starts again from what is left. Whenever the program says that a step is durable, and
whenever it deletes one, each committed step must be on the disk.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import disturbed
import fuse
import tensorstore as ts
from disturbed import Log, Phase, Settings, Start, read_log
from oracle import LEFT, LOST, WRONG, digest_of
from power_disk import DiskOperations, ask
from starts import ENDLESS, FAILED, HUNG, Processes, Runs
from support.commands import run

from torchax_ckpt import policies
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import fsync
from torchax_ckpt.storage.writing import array_writer

if TYPE_CHECKING:
    from torture import Torture

LACKING = "steps that the disk did not have"
FINDINGS = (LOST, WRONG, LACKING, LEFT, HUNG, FAILED)
TWO_PROCESSES = "two processes"
COPIES = "copy and export"  # the commands, instead of a training program
MODES = {
    "one tier": Settings(),
    "two tiers": Settings(has_local=True, every=4),
    "PreserveAll": Settings(policies.PreserveAll(), delete=0.2),
    "LatestN(1)": Settings(policies.LatestN(1)),
    "LatestN(2)": Settings(policies.LatestN(2)),
    "BestN": Settings(
        policies.AnyPreservationPolicy([policies.BestN(metric="loss", n=2), policies.LatestN(1)])
    ),
    "going back": Settings(back=0.35),
    "deleting": Settings(delete=0.35),
    "read_back": Settings(options={"read_back": True}),
    "compression": Settings(options={"compression": True}),
    TWO_PROCESSES: Settings(process_secs=60, heartbeat_secs=60),
    COPIES: Settings(policies.PreserveAll()),
    "two tiers, going back": Settings(policies.LatestN(1), has_local=True, every=4, back=0.35),
}
# Syncs that can be switched off: the paths that are then not synced.
WEAKENINGS: dict[str, Callable[[str], bool]] = {
    "files": lambda path: "/writing-" in path and os.path.isfile(path),
    "folders": lambda path: "/writing-" in path and os.path.isdir(path),
    "names": lambda path: os.path.basename(path) in ("run", "0") and os.path.isdir(path),
    "drafts": lambda path: path.endswith(".draft"),
    "exports": lambda path: ".partial" in path or path.endswith("/exports"),
    "arrays": lambda path: False,  # TensorStore's own syncs instead
}
EXPORTS = {"pt": ".pt", "dcp": "", "safetensors": "", "file": ".safetensors"}
NUM_EXPORTS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", choices=MODES, default=list(MODES))


def torture(torture: Torture) -> str:
    """Cuts so often, in turn in each mode; returns what this machine lacks to do that."""
    if problem := fuse.missing():
        return problem
    mount = torture.scratch / "disk"
    with fuse.mounted(mount, DiskOperations(), fsname="power", use_ino=True):
        _cut(torture, mount, torture.given.only)
    return ""


def _cut(torture: Torture, mount: Path, modes: list[str]) -> None:
    choose, off = torture.choose, torture.given.weakened
    folders = {mode: mount / str(number) for number, mode in enumerate(modes)}
    runs = Runs(torture, {m: MODES[m] for m in modes}, folders, can_read_local=True)
    source = torture.scratch / "source"
    if COPIES in modes:
        _save_source(source)

    def begin(mode: str, num_actions: int) -> Processes:
        directory = runs.directories[mode]
        act = functools.partial(copy_and_export, source) if mode == COPIES else disturbed.run
        program = functools.partial(weakened, off, act)
        places = directory, MODES[mode].local(directory)
        count = 1 + (mode == TWO_PROCESSES)
        return runs.begin(
            mode, count, num_actions, program, functools.partial(audit, mount, places)
        )

    def look(mode: str, processes: Processes, what: str, **how: Any) -> None:
        num_audits, *found = ask(mount, "problems").splitlines()
        torture.count("looks at what the disk has", int(num_audits))
        torture.find({LACKING: found}, what)
        runs.look(mode, processes, what, **how)

    for number in torture.rounds():
        mode = modes[(number - 1) % len(modes)]
        processes = begin(mode, ENDLESS)
        processes.wait_at_random(0, choose)
        phase = processes.phases[0].describe()
        processes.send(signal.SIGKILL, range(len(processes.started)))
        processes.wait()
        left = ask(mount, "cut", str(choose.randrange(1 << 30)))
        torture.count("cuts of the power", part=mode)
        for part in left.split("; "):
            torture.count("ways of forgetting", part=part)
        what = f"cut {number} ({mode}), while {phase}; left of {left}"
        look(mode, processes, what, ends={-signal.SIGKILL})
    for mode in modes if off is None else ():
        processes = begin(mode, 10)
        processes.wait()
        look(mode, processes, f"at the end ({mode})", ends={0}, is_finished=True)


def audit(mount: Path, places: Sequence[Path]) -> None:
    """Has the disk compare what it has with what it must have."""
    for place in places:
        if place.exists():
            ask(mount, "audit", str(place.relative_to(mount)))


def weakened(off: str | None, act: Callable[..., int], *args: Any) -> int:
    """Runs a program, which may sync less than it should."""
    if off is not None:
        switch_off(off)
    return act(*args)


def switch_off(what: str) -> None:
    """Has the program sync less than it does."""
    sync, context = fsync.sync, array_writer._context

    def fewer(path: Any) -> None:
        if not WEAKENINGS[what](os.fspath(path)):
            sync(path)

    fsync.sync = fewer
    if what == "arrays":
        array_writer._context = lambda: ts.Context({"file_io_sync": False}, parent=context())


# --- the commands --------------------------------------------------------------------------------


def _save_source(source: Path) -> None:
    """Saves steps to copy, on a medium that forgets nothing."""
    source.mkdir()
    settings = Settings(policies.PreserveAll(), back=0, delete=0)
    given = settings, Start(1, 1, 0, 1, 16, True), 0, None
    program = functools.partial(disturbed.run, source / "run", source / "log", *given)
    saves = Processes([program], source / "output", 60)
    saves.wait()
    assert saves.codes == {0: 0}, "there is nothing to copy"


def copy_and_export(
    source: Path,
    directory: Path,
    log_path: Path,
    settings: Settings,
    start: Start,
    index: int,
    on_durable: Callable[[], None],
    phase: Phase,
) -> int:
    """Copies steps one by one in their order, and exports some; deletes and copies them again."""
    disturbed.enable_torchax()
    choose, log = random.Random(start.seed), Log(log_path)
    told = {line["step"]: line for line in read_log(source / "log")[0] if line["what"] == "told"}
    steps = [s.step for s in RunDirectory(source / "run").steps() if s.step in told]
    assert len(steps) > NUM_EXPORTS
    exports = directory.with_name("exports")
    phase.watch_package()
    phase.say_saved()
    with phase("training"):
        for action in itertools.islice(itertools.count(), start.num_actions):
            there = [s.step for s in RunDirectory(directory).steps()]
            left = [step for step in steps if step > max(there, default=0)]
            if there and choose.random() < 0.4:
                kind = choose.choice(list(EXPORTS))
                out = exports / f"{start.attempt:06d}-{action:06d}{EXPORTS[kind]}"
                form = ["--format", "safetensors" if kind == "file" else kind]
                form += ["--max-shard-size", "200B"] * (kind == "safetensors")
                run("export", directory, choose.choice(there), out, *form)
                log("exported", name=out.name, digest=digest_of(out))
                for old in sorted(exports.iterdir())[:-NUM_EXPORTS]:
                    log("removed", name=old.name)
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
            elif left:
                run("copy", source / "run" / str(left[0]), directory)
                on_durable()
                details = {key: told[left[0]][key] for key in ("step", "lineage", "tiers")}
                log("told", **details)
            else:
                with settings.opened(directory) as ckpt, phase("deleting"):
                    for step in there:
                        log("delete", step=step)
                        ckpt.delete(step)
    return 0
