"""Has two hosts compete for a lease on a file system without hard links, O_EXCL and common locks.

A file system in user space shows one folder at two mount points, each from a server of its own, as
a network file system shows it to two hosts: the kernel's locks exclude within one mount only, a
file that exists can be created, and no file has two names. In each round, a process at each mount
takes the lease, which is free or was left by a host that died. Both may believe for a moment that
they have it; then exactly one still has it, and the other one is told before it changes anything.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fuse

from torchax_ckpt.errors import LeaseError
from torchax_ckpt.storage.directory import lease
from torchax_ckpt.storage.directory.lease import Lease, LeaseHolder

if TYPE_CHECKING:
    from torture import Torture

OTHERWISE = "rounds with another end"
FINDINGS = (OTHERWISE,)
WEAKENINGS = ("trusting",)  # who has taken the lease believes to have it


class SharedFolder(fuse.Operations):
    """Shows a folder, with less than a file system of this machine's would do."""

    use_ns = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _at(self, path: str) -> str:
        return f"{self._folder}{path}"

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.lstat(self._at(path))
        names = ("st_mode", "st_ino", "st_nlink", "st_size", "st_uid", "st_gid")
        times = {f"st_{of}time": getattr(status, f"st_{of}time_ns") for of in "amc"}
        return {name: getattr(status, name) for name in names} | times

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._at(path), flags & ~os.O_EXCL)

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._at(path), length)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._at(path))
        return 0

    def rename(self, old: str, new: str) -> int:
        os.rename(self._at(old), self._at(new))
        return 0

    def link(self, target: str, source: str) -> int:
        raise OSError(errno.EOPNOTSUPP, "no hard links")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def torture(torture: Torture) -> str:
    """Plays the rounds; returns what this machine lacks to do that."""
    if problem := fuse.missing():
        return problem
    folder, mounts = torture.scratch / "folder", [torture.scratch / name for name in "ab"]
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        for mount in mounts:
            stack.enter_context(fuse.mounted(mount, SharedFolder(folder), fsname="two hosts"))
        pipes = [multiprocessing.Pipe() for _ in mounts]
        pids = [
            fuse.fork(functools.partial(compete, mount, there, bool(torture.given.weakened)))
            for mount, (_, there) in zip(mounts, pipes, strict=True)
        ]
        hosts = [here for here, _ in pipes]
        _play(torture, folder, hosts)
        for host in hosts:
            host.send("end")
        for pid in pids:
            os.waitpid(pid, 0)
    return ""


def compete(directory: Path, told: Connection, is_trusting: bool) -> None:
    """Takes and checks the lease whenever it is told to, and says what came of it."""
    lease.this_kernel = lambda: f"host {directory.name}"
    lease.LEASE_SECS, lease.RENEW_SECS, lease._POLL_SECS = 0.5, 0.05, 0.02
    held = Lease(directory)
    while (what := told.recv()) != "end":
        try:
            if what == "release":
                held.release()
            elif not (is_trusting and what == "check"):
                held.hold()
            told.send("")
        except LeaseError as error:
            told.send(str(error))


def _play(torture: Torture, folder: Path, hosts: list[Connection]) -> None:
    def tell(what: str) -> list[str]:
        for host in hosts:
            host.send(what)
        return [host.recv() for host in hosts]

    for number in torture.rounds():
        kind = ("free", "left by a dead host")[number % 2]
        if number % 2:
            dead = LeaseHolder("t", "dead", 1, "another kernel", 1, 0.0, 0.0)
            (folder / "lease").write_bytes(dead.to_bytes())
        took = tell("hold").count("")
        have = tell("check")
        torture.count("rounds", part=f"{kind}: {took} took it")
        where = f"round {number} ({kind})"
        if have.count("") != 1:
            torture.find({OTHERWISE: [str(have)]}, where)
        tell("release")
        if left := os.listdir(folder):
            torture.find({OTHERWISE: [f"left {left}"]}, where)
            return
