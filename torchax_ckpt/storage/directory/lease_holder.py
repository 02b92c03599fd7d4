"""Describes the process that holds a lease, so that other processes can identify it."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import socket
import time
import uuid

# A token with the device and the inode of the leased directory. They stand in the token because
# a reader that does not know them could not parse a lease with one more field.
_TOKEN = re.compile(r"[0-9a-f]{32}-(?P<place>(?P<device>[0-9]+)-[1-9][0-9]*)")
_MAX_PID = 2**31 - 1
# The end of the year 9999, in seconds since the epoch: later dates cannot be written.
_MAX_SECS = 253_402_300_799


@dataclasses.dataclass(frozen=True)
class LeaseHolder:
    """The holder of a lease; times are in seconds since the epoch."""

    token: str  # tells this hold from others of the same process; may name the directory
    host: str  # for people
    pid: int
    kernel: str | None  # the kernel and set of process numbers of ``pid``; None if unknown
    started: int | None  # the process, in the kernel's ticks: a number may be used again
    since_secs: float
    renewed_secs: float  # the last sign of life

    @classmethod
    def here(cls, now: float, place: str = "") -> LeaseHolder:
        """Returns a holder that says: this process took the lease of ``place`` at ``now``."""
        process = process_of(os.getpid())
        started = process.started if process else None
        token = f"{uuid.uuid4().hex}-{place}" if place else uuid.uuid4().hex
        return cls(token, socket.gethostname(), os.getpid(), this_kernel(), started, now, now)

    @classmethod
    def of(cls, content: bytes) -> LeaseHolder | None:
        """Returns the holder that a lease file names; None if the file cannot be parsed."""
        try:
            found = cls(**json.loads(content))
        except (ValueError, TypeError, RecursionError):
            return None
        return found if found._is_plausible() else None

    def _is_plausible(self) -> bool:
        """Returns False if an attribute has a wrong type, or a number is negative or too large."""
        texts = (self.token, self.host, self.kernel or "")
        numbers = (self.pid, self.started or 0)
        times = (self.since_secs, self.renewed_secs)
        return (
            all(isinstance(text, str) for text in texts)
            and all(type(number) is int and number >= 0 for number in numbers)
            and self.pid <= _MAX_PID
            and all(type(secs) in (int, float) and 0 <= secs <= _MAX_SECS for secs in times)
        )

    def to_bytes(self) -> bytes:
        """Returns this holder as the content of a lease file."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode()

    def is_alive(self) -> bool | None:
        """Returns True if the holder's process runs, False if it has ended, None if unknown.

        Unknown are processes on another host or in another container, and killed ones of which some
        threads have not ended.
        """
        if self.kernel is None or self.kernel != this_kernel():
            return None
        process = process_of(self.pid)
        if process is None:
            return _is_hidden(self.pid)
        if process.started != self.started:
            return False
        if process.has_ended:
            # Another thread of a killed process may still be inside a system call.
            return None if process.num_threads > 1 else False
        return True

    def is_of_copy(self, place: str) -> bool | None:
        """Returns True if the lease came to ``place`` in a copy of its directory, None if unclear.

        A directory that is mounted twice may have two inodes, and a snapshot has the same inode as
        the original, so only two inodes of one device tell.
        """
        there = _TOKEN.fullmatch(self.token)
        is_here = self.kernel is not None and self.kernel == this_kernel()
        if not place or there is None or not is_here or there["place"] == place:
            return False
        return True if there["device"] == place.partition("-")[0] else None

    def describe(self, now: float) -> str:
        """Returns host, pid, start of the lease and age of the last sign of life, for messages."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since_secs))
        return (
            f"host {self.host}, pid {self.pid}, since {since}, last sign of life "
            f"{max(0.0, now - self.renewed_secs):.0f} s ago"
        )


@dataclasses.dataclass(frozen=True)
class _Process:
    has_ended: bool
    num_threads: int
    started: int


def process_of(pid: int) -> _Process | None:
    """Returns the process ``pid`` as ``/proc`` shows it; None if ``/proc`` does not show it."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        # The second field is the program's name, in parentheses, which may hold any character.
        fields = stat.rpartition(")")[2].split()
        return _Process(fields[0] in "ZX", int(fields[17]), int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def _is_hidden(pid: int) -> bool:
    """Returns whether the process ``pid``, of another user, runs although ``/proc`` hides it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def this_kernel() -> str | None:
    """Returns a name of this boot of the kernel and this pid namespace; None if unreadable."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None
