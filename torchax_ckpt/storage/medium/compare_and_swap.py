"""Replaces a small record, which several programs compete to write, by compare-and-swap.

A program that replaces the record names the content that it last read. If the record has changed
since then, nothing is written and the program gets ``Conflict``.

- On a local path, a program writes and syncs a new file, so that no loss of power leaves a part of
  it under the record's name. Then it locks the directory, compares, and renames the new file over
  the record. The first record is a hard link, which fails if a record exists. On NFS and FUSE, and
  for the first record without hard links, a gap of a round trip to the server remains between
  comparison and rename, because locks exclude programs of the same host only: if two hosts replace
  the record within it, both succeed, and the later rename stays.
- On a bucket, the server compares: a request names the generation that the record must still have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import re
import stat
import time
import uuid
from collections.abc import Iterator
from typing import Any

from torchax_ckpt.storage.medium import fsync, permissions

# The most bytes that are read of a local record; no valid record is so long.
_MAX_BYTES = 1 << 16
_CLOSED = -1


class Conflict(Exception):  # noqa: N818 - not an error: one of two possible results of an exchange
    """Says that another program has replaced the record since the caller read it."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """The content of a record that a program read, and what distinguishes it from other records.

    A regular file on a disk is distinguished by its content.
    """

    content: bytes
    version: Any
    changed: Any = dataclasses.field(default=None, compare=False)  # differs if written again


class AtomicRecord:
    """A small record in a folder that exists, which programs replace by compare-and-swap.

    At most ``max_bytes`` are read; a new record has this mode, less the umask. The bodies are what
    a disk does; ``BucketRecord`` is the same in a bucket.
    """

    def __init__(self, path: pathlib.Path, max_bytes: int = _MAX_BYTES, mode: int = 0o664) -> None:
        self._path, self._max_bytes, self._mode = path, max_bytes, mode
        # Kept open to distinguish a removed directory from a removed record.
        self._directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)

    def read(self) -> Seen | None:
        """Returns the present record, valid or not; None if there is no record."""
        try:
            kind = stat.S_IFMT(os.lstat(self._path).st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFDIR):
                return Seen(b"", kind)  # opening a pipe would block, and a link may lead elsewhere
            with open(self._path, "rb") as file:
                content = file.read(self._max_bytes)
                changed = os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None
        return Seen(content, content, changed)

    def swap(self, seen: Seen | None, content: bytes) -> Seen:
        """Replaces the record ``seen``, or creates it if None; Conflict if ``seen`` has changed."""
        name = f"{self._path.name}-{uuid.uuid4().hex}{permissions.DRAFT_SUFFIX}"
        draft = self._path.with_name(name)
        permissions.write_file(draft, content, self._mode)
        try:
            fsync.sync(draft)
            with self._locked():
                if self.read() != seen:
                    raise Conflict
                if seen is not None or not self._created_by_link(draft):
                    os.replace(draft, self._path)
        except FileNotFoundError:  # the holder of the lease has removed the draft
            raise Conflict from None
        finally:
            # The next cleanup of the directory removes a draft that stays.
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
        return Seen(content, content)

    def sync_name(self) -> None:
        """Makes durable that the record has its name; ``swap`` syncs its content only."""
        fsync.sync(self._path.parent)

    def _created_by_link(self, draft: pathlib.Path) -> bool:
        try:
            os.link(draft, self._path)
        except FileExistsError:
            raise Conflict from None
        except FileNotFoundError:
            raise
        except OSError:  # this file system has no hard links
            return False
        return True

    def remove_drafts(self, age_secs: float) -> None:
        """Removes the drafts of this user's programs that were killed so long ago."""
        name = rf"{re.escape(self._path.name)}-[0-9a-f]{{32}}{re.escape(permissions.DRAFT_SUFFIX)}"
        for draft in map(self._path.with_name, os.listdir(self._directory)):
            if not re.fullmatch(name, draft.name):
                continue
            with contextlib.suppress(FileNotFoundError):  # another machine has removed it
                found = draft.lstat()
                is_old = time.time() - found.st_mtime > age_secs
                if is_old and stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                    draft.unlink()

    def remove(self, seen: Seen) -> None:
        """Removes the record; does nothing if it has been replaced since ``seen`` was read."""
        with self._locked():
            if self.read() == seen:
                self._path.unlink()

    def place(self) -> str:
        """Returns device and inode of the record's directory, as "DEVICE-INODE"; "" on a bucket."""
        return _place(os.fstat(self._directory))

    def is_orphaned(self) -> bool:
        """Returns whether the record's directory was removed or moved; False on a bucket."""
        try:
            return self.place() != _place(os.stat(self._path.parent))
        except FileNotFoundError:
            return True

    def close(self) -> None:
        """Closes the file descriptor of the record's directory."""
        if self._directory != _CLOSED:
            directory, self._directory = self._directory, _CLOSED
            os.close(directory)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(self._directory, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                # close() would not unlock: a process forked meanwhile shares the descriptor.
                fcntl.flock(self._directory, fcntl.LOCK_UN)


def _place(directory: os.stat_result) -> str:
    return f"{directory.st_dev}-{directory.st_ino}"
