"""Owns who holds a lease: a process, as others can read and judge it."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import socket
import time
import uuid

_MAX_PID = 2**31 - 1
# Until the year 9999, as far as dates can be written.
_MAX_SECS = 253_402_300_799


@dataclasses.dataclass(frozen=True)
class LeaseHolder:
    """Who holds a lease.

    Attributes:
      token: tells one hold from another by the same process.
      host, pid: for people.
      kernel: which kernel and set of process numbers ``pid`` belongs to; None if unknown.
      started: when the process started, in the kernel's ticks: a number may be used again.
      since_secs: when the lease was taken, in seconds since the epoch.
      renewed_secs: the last sign of life.
    """

    token: str
    host: str
    pid: int
    kernel: str | None
    started: int | None
    since_secs: float
    renewed_secs: float

    @classmethod
    def here(cls, now: float) -> LeaseHolder:
        """This process."""
        process = process_of(os.getpid())
        started = process.started if process else None
        return cls(
            uuid.uuid4().hex, socket.gethostname(), os.getpid(), this_kernel(), started, now, now
        )

    @classmethod
    def of(cls, content: bytes) -> LeaseHolder | None:
        """Whom a lease names; None if it cannot be read."""
        try:
            found = cls(**json.loads(content))
        except (ValueError, TypeError, RecursionError):
            return None
        return found if found._is_plausible() else None

    def _is_plausible(self) -> bool:
        """Whether each of these is of its type, and a number that has a meaning."""
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
        """The content of the lease file."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode()

    def is_alive(self) -> bool | None:
        """Whether the process runs; None if that cannot be told from here, or not yet."""
        if self.kernel is None or self.kernel != this_kernel():
            return None
        process = process_of(self.pid)
        if process is None:
            return _is_hidden(self.pid)
        if process.started != self.started:
            return False
        if process.has_ended:
            # A killed process may still be inside a system call of another of its threads.
            return None if process.num_threads > 1 else False
        return True

    def describe(self, now: float) -> str:
        """For messages."""
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
    """The process of this number, as the kernel tells; None if it tells of none."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        # The second field is the program's name, in parentheses, and may hold anything.
        fields = stat.rpartition(")")[2].split()
        return _Process(fields[0] in "ZX", int(fields[17]), int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def _is_hidden(pid: int) -> bool:
    """Whether a process that /proc does not show runs: another user's may be hidden."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def this_kernel() -> str | None:
    """Tells this kernel and set of process numbers from every other; None if unknown."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None
