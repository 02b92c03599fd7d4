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
import urllib.parse
import uuid
from collections.abc import Iterator
from typing import Any

import fsspec

from torchax_ckpt.storage.medium import bucket, fsync, location, permissions

# The most bytes that are read of a local record; no valid record is so long.
_MAX_BYTES = 1 << 16
_CLOSED = -1
# The body of an upload in parts: metadata, of which there is none, and the content of a record.
_BOUNDARY = uuid.uuid4().hex
_PARTS = (
    f"--{_BOUNDARY}\r\nContent-Type: application/json\r\n\r\n{{}}\r\n"
    f"--{_BOUNDARY}\r\nContent-Type: application/octet-stream\r\n\r\nCONTENT\r\n--{_BOUNDARY}--\r\n"
).encode()


class Conflict(Exception):  # noqa: N818 - not an error: one of two possible results of an exchange
    """Says that another program has replaced the record since the caller read it."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """The content of a record that a program read, and what distinguishes it from other records."""

    content: bytes
    version: Any

    @property
    def is_local_file(self) -> bool:
        """Whether the record is a regular local file: only such a record can be torn."""
        return bool(self.version == self.content)


class _LocalRecord:
    def __init__(self, path: pathlib.Path, max_bytes: int, mode: int) -> None:
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
        except FileNotFoundError:
            return None
        return Seen(content, content)

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


class _BucketRecord:
    """The same for a record in a bucket, with the credentials and retries of gcsfs."""

    def __init__(self, url: str) -> None:
        self._bucket, _, self._key = url.partition("://")[2].partition("/")
        # The same arguments as etils uses for paths, so that both share one session.
        self._fs = fsspec.filesystem("gcs", finalize_on_close=True)

    def read(self) -> Seen | None:
        try:
            headers, content = self._object("GET", alt="media")
        except FileNotFoundError:
            return None
        return Seen(content, headers["x-goog-generation"])

    def swap(self, seen: Seen | None, content: bytes) -> Seen:
        place = f"/upload/storage/v1/b/{urllib.parse.quote(self._bucket)}/o"
        try:
            made = self._call(
                "POST",
                self._fs.base.replace("/storage/v1/", place),
                uploadType="multipart",
                name=self._key,
                ifGenerationMatch=seen.version if seen else "0",
                headers={"Content-Type": f'multipart/related; boundary="{_BOUNDARY}"'},
                data=_PARTS.replace(b"CONTENT", content),
                json_out=True,
            )
        except FileExistsError:  # gcsfs raises this for "precondition failed"
            # The request may have succeeded; if its answer was lost, gcsfs sent it again.
            now = self.read()
            if now is None or now.content != content:
                raise Conflict from None
            return now
        return Seen(content, made["generation"])

    def remove_drafts(self, age_secs: float) -> None:
        pass

    def remove(self, seen: Seen) -> None:
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            self._object("DELETE", ifGenerationMatch=seen.version)

    def _object(self, method: str, **query: str) -> Any:
        return self._call(method, "b/{}/o/{}", self._bucket, self._key, **query)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        with bucket.as_os_error(f"gs://{self._bucket}/{self._key}"):
            return self._fs.call(*args, **kwargs)

    def place(self) -> str:
        return ""

    def is_orphaned(self) -> bool:
        return False

    def close(self) -> None:
        pass


AtomicRecord = _LocalRecord | _BucketRecord
"""A small record at one path or URL, which programs replace by compare-and-swap."""


def record_at(path: Any, *, max_bytes: int = _MAX_BYTES, mode: int = 0o664) -> AtomicRecord:
    """Returns the record at a local path, whose directory must exist, or at a ``gs://`` URL.

    Of a local record, at most ``max_bytes`` are read; a new one has this mode, less the umask.
    """
    if location.is_url(path):
        return _BucketRecord(str(path))
    return _LocalRecord(pathlib.Path(path), max_bytes, mode)
