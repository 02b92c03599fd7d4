"""Owns one small record that several programs compete for.

It is only ever replaced by whoever knows its present content, so that of two that saw the same
content one wins and the other is told. What makes this atomic:

- On a local path: a lock on the directory, held for the moment of the exchange, and a rename; a
  first record is created by a hard link. Network file systems that know no locks on directories
  leave a gap of microseconds between looking and renaming, in which the later of two wins.
- On a bucket: the server's own condition, "if the generation is still this one".
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import stat
import urllib.parse
import uuid
from collections.abc import Iterator
from typing import Any, Protocol

import fsspec

from torchax_ckpt.storage.medium import location, permissions

DRAFT_SUFFIX = ".draft"
# More than any record has; of a longer one no more is read.
_MAX_BYTES = 1 << 16


class Conflict(Exception):  # noqa: N818 - not an error: the other side of every exchange
    """The record is not what the caller saw."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a record was: its content, and what tells it from what was there before and after."""

    content: bytes
    version: Any


class AtomicRecord(Protocol):
    """A record at one place."""

    def read(self) -> Seen | None:
        """What is there now, which may be anything; None for nothing."""

    def swap(self, seen: Seen | None, content: bytes) -> Seen:
        """Replaces what was seen.

        Raises:
          Conflict: something else is there now.
        """

    def remove(self, seen: Seen) -> None:
        """Removes what was seen; something else is left alone."""

    def is_orphaned(self) -> bool:
        """Whether the directory that held the record has been removed, or moved elsewhere."""

    def close(self) -> None:
        """Lets go of files that are held open."""


def record_at(path: Any) -> AtomicRecord:
    """The record at a local path, whose directory exists, or at a ``gs://`` URL."""
    if location.is_bucket(path):
        return _BucketRecord(str(path))
    return _LocalRecord(pathlib.Path(path))


class _LocalRecord:
    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        # Kept open: it tells a directory that was removed from one whose record was.
        self._directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)

    def read(self) -> Seen | None:
        try:
            kind = stat.S_IFMT(os.lstat(self._path).st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFDIR):
                return Seen(b"", kind)  # a pipe would be waited for, a link lead elsewhere
            with open(self._path, "rb") as file:
                content = file.read(_MAX_BYTES)
        except FileNotFoundError:
            return None
        return Seen(content, content)

    def swap(self, seen: Seen | None, content: bytes) -> Seen:
        draft = self._path.with_name(f"{self._path.name}-{uuid.uuid4().hex}{DRAFT_SUFFIX}")
        permissions.write_file(draft, content)
        try:
            with self._locked():
                if self.read() != seen:
                    raise Conflict
                if seen is not None or not self._created_by_link(draft):
                    os.replace(draft, self._path)
        except FileNotFoundError:  # whoever holds the lease has cleaned up
            raise Conflict from None
        finally:
            draft.unlink(missing_ok=True)
        return Seen(content, content)

    def _created_by_link(self, draft: pathlib.Path) -> bool:
        try:
            os.link(draft, self._path)
        except FileExistsError:
            raise Conflict from None
        except FileNotFoundError:
            raise
        except OSError:  # no hard links on this file system
            return False
        return True

    def remove(self, seen: Seen) -> None:
        with self._locked():
            if self.read() == seen:
                self._path.unlink()

    def is_orphaned(self) -> bool:
        opened = os.fstat(self._directory)
        try:
            now = os.stat(self._path.parent)
        except FileNotFoundError:
            return True
        return (opened.st_dev, opened.st_ino) != (now.st_dev, now.st_ino)

    def close(self) -> None:
        os.close(self._directory)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with contextlib.suppress(OSError):  # not on every network file system
            fcntl.flock(self._directory, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                # Not left to close(): a process forked meanwhile holds the descriptor too.
                fcntl.flock(self._directory, fcntl.LOCK_UN)


class _BucketRecord:
    """Talks to the server through gcsfs, with its credentials and its retries."""

    def __init__(self, url: str) -> None:
        self._bucket, _, self._key = url.partition("://")[2].partition("/")
        # As etils makes it for paths: one file system, one session.
        self._fs = fsspec.filesystem("gcs", finalize_on_close=True)

    def read(self) -> Seen | None:
        try:
            headers, content = self._object("GET", alt="media")
        except FileNotFoundError:
            return None
        return Seen(content, headers["x-goog-generation"])

    def swap(self, seen: Seen | None, content: bytes) -> Seen:
        bucket = urllib.parse.quote(self._bucket)
        try:
            made = self._call(
                "POST",
                self._fs.base.replace("/storage/v1/", f"/upload/storage/v1/b/{bucket}/o"),
                uploadType="media",
                name=self._key,
                ifGenerationMatch=seen.version if seen else "0",
                headers={"Content-Type": "application/octet-stream"},
                data=content,
                json_out=True,
            )
        except FileExistsError:  # what gcsfs makes of "precondition failed"
            # Perhaps it succeeded, the answer was lost, and it was sent again.
            now = self.read()
            if now is None or now.content != content:
                raise Conflict from None
            return now
        return Seen(content, made["generation"])

    def remove(self, seen: Seen) -> None:
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            self._object("DELETE", ifGenerationMatch=seen.version)

    def is_orphaned(self) -> bool:
        return False  # a bucket has no directories

    def close(self) -> None:
        pass

    def _object(self, method: str, **query: str) -> Any:
        return self._call(method, "b/{}/o/{}", self._bucket, self._key, **query)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._fs.call(*args, **kwargs)
        except OSError:
            raise
        except Exception as error:  # gcsfs has errors of its own, and lets its libraries' through
            raise OSError(f"gs://{self._bucket}/{self._key}: {error!r}") from error
