"""Programs that save to real media that fail, and read from them.

    python failing_media.py SCENARIO FOLDER ...

SCENARIO is a function of this file, which takes the other arguments.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
import torch._dynamo
import torchax
from support.compare import assert_trees_identical
from support.damage import halve
from support.stages import at

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.errors import CorruptCheckpointError, DirectoryError, SaveError
from torchax_ckpt.runtime.stages import Stage

torchax.enable_globally()
said: list[tuple[str, str]] = []


class Ear(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        said.append((record.levelname, record.getMessage()))


class SmallDisk:
    """A file system of 12 MiB in memory, mounted at a folder."""

    advice = "The disk is full: free space", "mount it for writing"

    def __init__(self, path: Path) -> None:
        self._path, self._ballast = path, path / "ballast"
        path.mkdir()
        self._mount("-t", "tmpfs", "-o", f"size={12 << 20},mode=755", "tmpfs")

    def _mount(self, *how: str) -> None:
        subprocess.run(["mount", *how, str(self._path)], check=True, capture_output=True)

    def leave(self, num_bytes: int) -> None:
        """Leaves so much room on the disk."""
        with contextlib.suppress(OSError), open(self._ballast, "wb", buffering=0) as file:
            for size in (1 << 16, 1 << 12):
                with contextlib.suppress(OSError):
                    while file.write(b"x" * size):
                        pass
        os.truncate(self._ballast, self._ballast.stat().st_size - num_bytes)

    def free(self) -> None:
        self._ballast.unlink()

    def set_writable(self, is_writable: bool) -> None:
        self._mount("-o", f"remount,{'rw' if is_writable else 'ro'}")


class LimitedDisk:
    """A folder in which this process, without root's rights, can write little or nothing."""

    advice = "ulimit -f", "check owner and mode"

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir()
        path.chmod(0o777)
        become_nobody()
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def leave(self, num_bytes: int) -> None:
        """Leaves so much room for every file."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, self._limits[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)

    def set_writable(self, is_writable: bool) -> None:
        for folder in [*self._path.iterdir(), *self._path.glob("*/*")]:
            if folder.is_dir():
                folder.chmod(0o755 if is_writable else 0o555)


def become_nobody() -> None:
    """Gives up root's rights, which no permission stops."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.arange(200_000.0) + step, "h": np.full(9, step)}


def fails(ckpt: TorchaxCheckpointer, steps: Sequence[int], *advice: str) -> None:
    """Saves steps, which all fail; that is logged once, and raised once."""
    before = ckpt.all_steps()
    for step in steps:
        assert ckpt.save(step, state=state(step), force=True)  # training goes on
    ckpt._saver.wait()
    (error,) = [text for level, text in said if level == "ERROR"]
    assert all(text in error for text in (f"saving step {steps[0]} to", *advice)), error
    try:
        ckpt.check_for_errors()
    except SaveError as raised:
        assert raised.step == steps[0]
    else:
        raise AssertionError("no error")
    ckpt.check_for_errors()
    check(ckpt, before)


def recovers(ckpt: TorchaxCheckpointer, step: int, expected: Sequence[int], after: int) -> None:
    said.clear()
    assert ckpt.save(step, state=state(step), force=True)
    ckpt.wait_until_finished()
    (again,) = [text for _, text in said if "works again" in text]
    assert f"after {after} failed save" in again, again
    check(ckpt, expected)
    said.clear()


def check(ckpt: TorchaxCheckpointer, steps: Sequence[int]) -> None:
    assert ckpt.all_steps() == [*steps]
    for step in steps:
        assert_trees_identical(ckpt.load(step), state(step), shardings=False)
    there = {path.name for path in Path(ckpt.directory).iterdir()} - {"lease", "events"}
    assert there == {*map(str, steps)}, there


def saves(folder: str, kind: str) -> None:
    """Saves to a medium that becomes full, read-only and removed, and works again each time."""
    logger = logging.getLogger("torchax_ckpt")
    logger.setLevel(logging.INFO)
    logger.addHandler(Ear())
    kinds: dict[str, Any] = {"mounted": SmallDisk, "limited": LimitedDisk}
    disk = kinds[kind](Path(folder))
    run = Path(folder, "run")
    ckpt = TorchaxCheckpointer(run)
    for step in (1, 2):
        ckpt.save(step, state=state(step), force=True)
    ckpt.wait_until_finished()
    is_full, is_read_only = disk.advice
    for first, room, expected in ((3, 300_000, [1, 2, 6]), (10, 0, [2, 6, 13])):
        disk.leave(room)
        fails(ckpt, [first, first + 1, first + 2], is_full)
        disk.free()
        recovers(ckpt, first + 3, expected, after=3)
    disk.set_writable(False)
    fails(ckpt, [20, 21], is_read_only)
    disk.set_writable(True)
    recovers(ckpt, 22, [6, 13, 22], after=2)

    def remove() -> None:
        run.rename(f"{folder}/gone")
        shutil.rmtree(f"{folder}/gone")

    cases: dict[int, Stage] = {30: "write the arrays", 40: "commit", 50: "commit the folder"}
    for step, stage in cases.items():
        go_on = at(stage, remove)
        assert ckpt.save(step, state=state(step), force=True)
        ckpt._saver.wait()
        go_on()
        assert [level for level, _ in said].count("ERROR") == 1, said
        with contextlib.suppress(SaveError):
            ckpt.check_for_errors()
        recovers(ckpt, step + 1, [step + 1], after=1)
    ckpt.close()


def reads(folder: str) -> None:
    """Reads a run as a user who may not read one of its files after the other."""
    model = torch.nn.Linear(2, 2).to("jax")  # imports what a lesser user may not be able to read
    become_nobody()
    warnings.simplefilter("error")
    os.umask(0)
    run = Path(folder) / "run"
    with TorchaxCheckpointer(run) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state={"w": np.full(70_000, step)}, force=True)
    for path in [run, *run.rglob("*")]:
        assert not path.stat().st_mode & 0o002, f"{path} is writable for everybody"

    used = set()
    for path in [p for p in (run / "2").rglob("*") if p.is_file()]:
        mode = path.stat().st_mode
        path.chmod(0)
        try:
            loaded = TorchaxCheckpointer(run).load()  # of the newest step, never of the one before
            np.testing.assert_array_equal(loaded["w"], np.full(70_000, 2))
        except DirectoryError as error:
            assert "Permission denied" in str(error) and "check owner and mode" in str(error), error
            used.add(path.relative_to(run / "2").parts[0])
        path.chmod(mode)
    parts = {"_CHECKPOINT_METADATA", "commit_success.txt", "manifest", "state", "summary"}
    assert used == parts, used

    run.chmod(0)
    try:
        TorchaxCheckpointer(run).attach(model)
    except DirectoryError as error:
        assert "check owner and mode" in str(error), error
    else:
        raise AssertionError("began anew beside a directory that cannot be read")
    run.chmod(0o755)

    halve(max((run / "2").rglob("*"), key=lambda p: p.stat().st_size))
    try:
        TorchaxCheckpointer(run).load(2)
    except CorruptCheckpointError as error:
        assert "OUT_OF_RANGE" in str(error), error
    warnings.simplefilter("ignore")
    np.testing.assert_array_equal(TorchaxCheckpointer(run).load()["w"], np.full(70_000, 1))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    print("all is well")
