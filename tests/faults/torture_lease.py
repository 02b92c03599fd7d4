"""Has two hosts compete for a lease on a file system without hard links, O_EXCL and common locks.

    python tests/faults/torture_lease.py --rounds 200

A file system in user space shows one folder at two mount points, each from a server of its own, as
a network file system shows it to two hosts: the kernel's locks exclude within one mount only, a
file that exists can be created, and no file has two names. In each round, a process at each mount
takes the lease, which is free or was left by a host that died. Both may believe for a moment that
they have it; then exactly one still has it, and the other one is told before it changes anything.

Exit code 1 if in some round none or both had it, or something was left; 2 if this machine cannot
mount such a file system.
"""

from __future__ import annotations

import argparse
import collections
import errno
import functools
import logging
import multiprocessing
import os
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import power_fuse
from torture_kill import fork, wait_for

from torchax_ckpt.errors import LeaseError
from torchax_ckpt.storage.directory import lease, lease_holder
from torchax_ckpt.storage.directory.lease import Lease
from torchax_ckpt.storage.directory.lease_holder import LeaseHolder


def serve(folder: Path, mount: Path) -> None:
    """Shows a folder at a mount point, until it is unmounted."""
    import mfusepy

    def at(path: str) -> str:
        return f"{folder}{path}"

    class Operations(mfusepy.Operations):
        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            status = os.lstat(at(path))
            names = ("st_mode", "st_ino", "st_nlink", "st_size", "st_uid", "st_gid")
            times = {f"st_{of}time": getattr(status, f"st_{of}time_ns") for of in "amc"}
            return {name: getattr(status, name) for name in names} | times

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(at(path))]

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            return os.open(at(path), os.O_RDWR | os.O_CREAT, mode)

        def open(self, path: str, flags: int) -> int:
            return os.open(at(path), flags & ~os.O_EXCL)

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            os.truncate(at(path), length)
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            os.fsync(fh)
            return 0

        def unlink(self, path: str) -> int:
            os.unlink(at(path))
            return 0

        def rename(self, old: str, new: str) -> int:
            os.rename(at(old), at(new))
            return 0

        def link(self, target: str, source: str) -> int:
            raise OSError(errno.EOPNOTSUPP, "no hard links")

    mfusepy.FUSE(
        Operations(),
        str(mount),
        foreground=True,
        nothreads=True,
        entry_timeout=0,
        negative_timeout=0,
        attr_timeout=0,
        fsname="two hosts",
    )


def compete(directory: Path, host: str, told: Connection) -> None:
    """Takes and checks the lease whenever it is told to, and says what came of it."""
    lease_holder.this_kernel = lease.this_kernel = lambda: host
    lease.LEASE_SECS, lease.RENEW_SECS, lease._POLL_SECS = 0.5, 0.05, 0.02
    held = Lease(directory)
    while (what := told.recv()) != "end":
        try:
            held.release() if what == "release" else held.hold()
            told.send("")
        except LeaseError as error:
            told.send(str(error))


def torture(num_rounds: int, scratch: Path) -> int:
    """Plays the rounds; prints the table; returns the exit code."""
    folder, mounts = scratch / "folder", [scratch / "a", scratch / "b"]
    for path in (folder, *mounts):
        path.mkdir()
    servers = [fork(functools.partial(serve, folder, mount)) for mount in mounts]
    hosts, pids = [], []
    counts: collections.Counter[str] = collections.Counter()
    failures = []
    try:
        for mount, server in zip(mounts, servers, strict=True):
            assert wait_for(functools.partial(os.path.ismount, mount), server, 20), "no mount"
            here, there = multiprocessing.Pipe()
            hosts.append(here)
            pids.append(fork(functools.partial(compete, mount, f"host {mount.name}", there)))

        def tell(what: str) -> list[str]:
            for host in hosts:
                host.send(what)
            return [host.recv() for host in hosts]

        for number in range(num_rounds):
            kind = ("free", "left by a dead host")[number % 2]
            if number % 2:
                dead = LeaseHolder("t", "dead", 1, "another kernel", 1, 0.0, 0.0)
                (folder / "lease").write_bytes(dead.to_bytes())
            took = tell("hold").count("")
            have = tell("hold")
            counts[f"{kind}: {took} took it"] += 1
            if have.count("") != 1 or not any(said for said in have):
                failures.append(f"round {number} ({kind}): {have}")
            tell("release")
            if left := os.listdir(folder):
                failures.append(f"round {number} ({kind}): left {left}")
                break
        for host in hosts:
            host.send("end")
        for pid in pids:
            os.waitpid(pid, 0)
    finally:
        for mount, server in zip(mounts, servers, strict=True):
            power_fuse.unmount(mount)
            os.waitpid(server, 0)
    for name, count in sorted(counts.items()):
        print(f"{name:<40}{count:>6}")
    print(f"{'rounds with another end':<40}{len(failures):>6}", *failures[:5], sep="\n")
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    if problem := power_fuse.missing():
        print(f"torture-lease cannot run on this machine: {problem}", file=sys.stderr)
        return 2
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        return torture(arguments.rounds, Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
