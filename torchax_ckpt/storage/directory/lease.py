"""Implements the lease of a directory; only the program that holds the lease may write there.

The lease is a small file in the directory. It names the holder's host and process, its start, and
the last sign of life, which a thread renews every 20 s. If a program that wants to write finds one:

- If its holder, a process on the same host, has ended (according to the kernel), the program takes
  the lease over immediately. It also does so if the file is empty or ends in the middle, as a loss
  of power may leave it: a program writes and syncs the whole file before it gives it its name.
- If its holder is a running process on the same host, the program is refused immediately. A lease
  that was copied with its directory refuses nobody: it states the inode of the original directory.
- If its holder is a process on another host, which cannot be examined, the program waits until the
  last sign of life is 60 s old, and then takes the lease over; another sign of life refuses it.

"The same host" means one kernel and one set of process numbers: a container is a host of its own.
The clocks of hosts that share a directory should agree to within half a minute, or another program
may take the lease over although the holder still renews it.

A holder that stalled for longer than 60 s may have lost the lease without noticing it. It therefore
reads the lease again right before any of its changes becomes visible, and stops if another program
has it. A gap remains between this read and the rename or upload that makes the change visible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from torchax_ckpt.errors import LeaseError
from torchax_ckpt.runtime.background import Flag, Task
from torchax_ckpt.storage.medium import medium
from torchax_ckpt.storage.medium.compare_and_swap import AtomicRecord, Conflict, Seen

logger = logging.getLogger(__name__)

NAME = "lease"
LEASE_SECS = 60.0
RENEW_SECS = 20.0
_POLL_SECS = 0.5
# No lease is longer, not even one that a loss of power has damaged.
_MAX_BYTES = 4096
# A token with the device and the inode of the leased directory. They stand in the token because
# older releases could not parse a lease with one more field.
_TOKEN = re.compile(r"[0-9a-f]{32}-(?P<place>(?P<device>[0-9]+)-[1-9][0-9]*)")
_MAX_PID = 2**31 - 1
# The end of the year 9999, in seconds since the epoch: later dates cannot be written.
_MAX_SECS = 253_402_300_799


class Lease:
    """Takes, renews, checks and releases the lease of one directory for one checkpointer."""

    def __init__(
        self,
        directory: Any,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._sleep = sleep
        self._hold: _Hold | None = None

    @property
    def token(self) -> str:
        """A unique name, made when this object took the lease; "" while it holds no lease."""
        return self._hold.holder.token if self._hold is not None else ""

    def hold(self) -> None:
        """Takes the lease, or checks that it is held; LeaseError if another program has it."""
        hold = self._hold
        if hold is not None and not hold.is_orphaned():
            hold.confirm()
            return
        self.release()  # the directory and the lease in it were removed: take a new lease
        record = medium.of(self._directory).record(self._directory / NAME)
        try:
            taken = self._compete(record)
        except BaseException:
            record.close()
            raise
        self._hold = taken

    def renew(self) -> None:
        """Writes a new sign of life into the lease now; a separate thread does so every 20 s."""
        if self._hold is not None:
            self._hold.renew()

    def release(self) -> None:
        """Releases the lease, so that other programs can take it; does nothing if not held."""
        if (hold := self._hold) is not None:
            hold.end()
            self._hold = None  # not before, so that an interrupted call can be made again

    def _compete(self, record: AtomicRecord) -> _Hold:
        """Takes the lease once nobody holds it; raises LeaseError if somebody does."""
        first: Seen | None = None
        first_secs = 0.0
        place = record.place()
        while True:
            now = self._clock()
            seen = record.read()
            if seen is not None:
                other = LeaseHolder.of(seen.content)
                is_alive = False if _is_torn(seen) else None
                if other is not None:
                    is_interrupted = _is_here(other) and other.token not in _tokens
                    is_left = is_interrupted or other.is_of_copy(place)
                    is_alive = False if is_left else other.is_alive()
                if is_alive or (is_alive is None and first is not None and seen != first):
                    raise self._refused(other, place, now)
                if is_alive is None:
                    if first is None:
                        first, first_secs = seen, now
                        self._log_waiting(other, now)
                    last_sign = min(other.renewed_secs, first_secs) if other else first_secs
                    remaining = last_sign + LEASE_SECS - now
                    if remaining > 0:
                        self._sleep(min(remaining, _POLL_SECS))
                        continue
                who = other.describe(now) if other else "a program that its file does not name"
                logger.info("%s: taking over the lease of %s", self._directory, who)
            holder = LeaseHolder.here(now, place)
            taken = None
            try:
                _tokens.add(holder.token)
                taken = record.swap(seen, holder.to_bytes())
                return _Hold(record, taken, holder, self._directory, self._clock)
            except BaseException as error:  # also an interrupt, or no thread can be started
                _tokens.discard(holder.token)
                if taken is not None:
                    # If it stays, this process takes it over, and others once it has expired.
                    with contextlib.suppress(OSError):
                        record.remove(taken)
                if not isinstance(error, Conflict):
                    raise

    def _log_waiting(self, other: LeaseHolder | None, now: float) -> None:
        if other is None or other.renewed_secs + LEASE_SECS > now:
            logger.warning(
                "%s: another program holds the lease (%s). Waiting to see whether it is still "
                "running, for at most %.0f s",
                self._directory,
                other.describe(now) if other else "its file does not name the program",
                LEASE_SECS,
            )

    def _refused(self, other: LeaseHolder | None, place: str, now: float) -> LeaseError:
        who = other.describe(now) if other else "unknown"
        if other is not None and _is_here(other):
            who = f"another checkpointer of this very process ({who}), which is still referenced"
            what_to_do = (
                "Close that one first. If no variable refers to it any more, a notebook's Out and "
                "_, or the traceback of the last error (sys.last_value), may still do so: delete "
                "these"
            )
        elif other is not None and other.is_of_copy(place) is None:
            what_to_do = (
                "It took the lease on another device: if this directory is a copy, remove its file "
                "lease. End that program"
            )
        else:
            what_to_do = "End that program"
        return LeaseError(
            f"{self._directory}: another program writes to this directory: {who}. {what_to_do}, or "
            "give this one a directory of its own; reading needs no lease. The lease of a program "
            f"that died on another host expires {LEASE_SECS:.0f} s after its last sign of life."
            f"{_unconnected(other)}",
            path=self._directory,
        )


def _unconnected(other: LeaseHolder | None) -> str:
    """Returns advice for two processes of one run that do not know of each other; else ""."""
    jax = sys.modules.get("jax")  # not imported: steps are copied without it, too
    if jax is None or jax.distributed.is_initialized() or (other and _is_here(other)):
        return ""
    return (
        " If both are processes of one run, call jax.distributed.initialize() first in each: "
        "without it, each takes itself for the only one."
    )


def _is_torn(seen: Seen) -> bool:
    """Returns whether a lease is the beginning of a valid one, in part perhaps zeros, or empty."""
    # A service replaces an object as a whole, and a link or a folder holds no lease.
    if seen.version != seen.content or len(seen.content) > _MAX_BYTES:
        return False
    left = seen.content.rstrip(b"\0")
    return not left or (left.startswith(b"{") and not left.endswith(b"}"))


# The tokens of the leases that this process holds or is taking. A lease of this process whose token
# is not among them was left by an interrupt; nobody renews or removes it.
_tokens: set[str] = set()


def _is_here(other: LeaseHolder) -> bool:
    is_known = other.kernel is not None and other.kernel == this_kernel()
    return is_known and other.pid == os.getpid()


class _Hold:
    """A lease that this process took; a thread renews the lease until it is released or lost."""

    def __init__(
        self,
        record: AtomicRecord,
        seen: Seen,
        holder: LeaseHolder,
        directory: Any,
        clock: Callable[[], float],
    ) -> None:
        self.holder = holder
        self._record = record
        self._seen = seen
        self._directory = directory
        self._clock = clock
        self._loss: str | None = None
        self._lock = threading.Lock()
        self._ended = Flag()
        self._task = Task("lease", self._renew_until_ended)
        self._task.start()

    def is_orphaned(self) -> bool:
        """Returns whether the directory was removed or moved; False if forked from the holder."""
        return self._is_this_process() and self._record.is_orphaned()

    def confirm(self) -> None:
        """Raises LeaseError if the lease is lost, or if this process was forked from the holder."""
        if not self._is_this_process():
            raise LeaseError(
                f"{self._directory}: this process was forked from the process that writes to this "
                f"directory ({self.holder.describe(self._clock())}). Save in the parent process, "
                "or give this process a Checkpointer and a directory of its own.",
                path=self._directory,
            )
        with self._lock:
            self._require_not_lost()
            now = self._record.read()
            if now != self._seen:
                self._lose(now)
            self._require_not_lost()

    def renew(self) -> None:
        """Writes a new sign of life into the lease."""
        with self._lock:
            if self._loss is not None or self._ended.is_set or not self._is_this_process():
                return
            renewed = dataclasses.replace(self.holder, renewed_secs=self._clock())
            try:
                try:
                    self._seen = self._record.swap(self._seen, renewed.to_bytes())
                    self.holder = renewed
                except Conflict:
                    now = self._record.read()
                    # A cleanup of this program may have removed the draft of the record meanwhile.
                    if now != self._seen and not self._record.is_orphaned():
                        self._lose(now)
            except OSError as error:
                # Only writes need the lease, and each write checks the lease itself.
                logger.warning("%s: cannot renew the lease: %s", self._directory, error)

    def end(self) -> None:
        """Ends renewal and removes the file, unless the lease is lost or the process was forked."""
        if not self._is_this_process():
            return
        self._ended.set()
        if not sys.is_finalizing():
            self._task.ended.wait()
        with self._lock:
            try:
                if self._loss is None and self.holder.token in _tokens:
                    self._record.remove(self._seen)
            except OSError as error:
                logger.warning("%s: cannot release the lease: %s", self._directory, error)
            _tokens.discard(self.holder.token)
            self._record.close()

    def _renew_until_ended(self) -> None:
        while not self._ended.wait(RENEW_SECS) and self.holder.token in _tokens:
            self.renew()

    def _is_this_process(self) -> bool:
        """Returns True in the process that took the lease, False in a process forked from it."""
        return self.holder.pid == os.getpid()

    def _lose(self, now: Seen | None) -> None:
        other = LeaseHolder.of(now.content) if now is not None else None
        if now is not None and other is not None and other.token == self.holder.token:
            # A sign of life of this process, which a service stored without an answer.
            self._seen, self.holder = now, other
            return
        self._loss = (
            f"it is held by {other.describe(self._clock())}"
            if other is not None
            else "its file was removed or overwritten"
        )
        logger.error("%s: the lease is lost: %s", self._directory, self._loss)

    def _require_not_lost(self) -> None:
        if self._loss is not None:
            raise LeaseError(
                f"{self._directory}: this program ({self.holder.describe(self._clock())}) has lost "
                f"its lease: {self._loss}. It writes nothing more; the steps that it reported "
                "durable are intact. A program loses its lease if it stalls for more than "
                f"{LEASE_SECS:.0f} s, or if the clocks of two hosts differ. End this program. To "
                "run it instead of the program that holds the lease now, end that program too, "
                "then start this program again: it goes on from the newest step.",
                path=self._directory,
            )


@dataclasses.dataclass(frozen=True)
class LeaseHolder:
    """The holder of a lease; times are in seconds since the epoch."""

    token: str  # tells this hold from others of the same process; may name the directory
    host: str  # for people
    pid: int
    kernel: str | None  # the kernel and set of process numbers of ``pid``; None if unknown
    started: int | None  # the start of the process in the kernel's ticks: a pid may be used again
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
            holder = cls(**json.loads(content))
        except (ValueError, TypeError, RecursionError):
            return None
        return holder if holder._is_plausible() else None

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
        """Returns whether the holder's process runs; None if that cannot be known here."""
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

        A directory that is mounted twice may have two inodes. Two inodes of one device are a proof.
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
        stat = pathlib.Path(f"/proc/{pid}/stat").read_bytes()
        # The second field is the program's name, in parentheses, which may hold any character.
        fields = stat.rpartition(b")")[2].split()
        return _Process(fields[0] in b"ZX", int(fields[17]), int(fields[19]))
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
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None
