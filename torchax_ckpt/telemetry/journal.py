"""Owns the events of a directory as files: lines of JSON in ``DIRECTORY/events``.

    events/1732201234123456789-5f0c2a9e.jsonl     when it was begun, and by which run

Every run appends to files of its own, so runs cannot harm each other's, and a process killed in the
middle of a line spoils that line alone. A file that has grown to 64 KiB is left for a new one; of
the newest 512 the rest is removed, the oldest first. On a bucket, where nothing can be appended to,
the present file is written anew each time. Files are not synced: what they tell is worth no wait.

Files here are read as data from elsewhere: regular ones alone, and never more than a run writes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence

from etils import epath

from torchax_ckpt.storage.medium import bucket, location
from torchax_ckpt.telemetry.events import Event

logger = logging.getLogger(__name__)

FOLDER = "events"
MAX_FILES = 512
MAX_FILE_BYTES = 64 << 10
# What is read of one: lines that were appended at once may go beyond it.
_MAX_READ_BYTES = 16 * MAX_FILE_BYTES
# What is read of all: more than runs write, and what a machine can hold of the smallest events.
_MAX_ALL_BYTES = 64 << 20
_MAX_ALL_LINES = 500_000
_AT_ONCE = 32
_NAME = re.compile(r"(\d{19})-([0-9a-f]{8})\.jsonl")


class Journal:
    """What one run appends to.

    Args:
      directory: of the run; it exists.
      run: eight hexadecimal digits that no other run has.
    """

    def __init__(self, directory: epath.Path, run: str) -> None:
        self._folder = directory / FOLDER
        self._run = run
        self._is_bucket = location.is_bucket(directory)
        self._name = ""
        self._size = 0
        self._written: list[bytes] = []  # of the present file, where it is written anew
        self._is_torn = False

    @property
    def patience_secs(self) -> float:
        """How far apart appends should be: a bucket takes an object anew once per second at most.

        What a killed program has not appended is lost.
        """
        return 10.0 if self._is_bucket else 0.1

    def append(self, lines: Sequence[bytes]) -> None:
        """Adds lines, each with its end; where this raises, perhaps a part of them.

        Raises:
          OSError: and errors of a bucket's clients.
        """
        content = b"".join(lines)
        if not self._name or self._size >= MAX_FILE_BYTES:
            self._begin()
        if self._is_bucket:
            (self._folder / self._name).write_bytes(b"".join((*self._written, content)))
            self._written.append(content)
        else:
            self._append_locally(content)
        self._size += len(content)

    def _begin(self) -> None:
        if not self._is_bucket:
            # Not the directory above it: who removed that, or put a link there, meant it.
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._folder, 0o775)
        for name in sorted(_names(self._folder))[: 1 - MAX_FILES]:
            if self._is_bucket:
                bucket.remove(self._folder / name)
            else:
                with _opened(self._folder) as folder, contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
        self._name = f"{time.time_ns():019d}-{self._run}.jsonl"
        self._size, self._written, self._is_torn = 0, [], False

    def _append_locally(self, content: bytes) -> None:
        if self._is_torn:
            content = b"\n" + content
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._is_torn = True
        with _opened(self._folder) as folder:
            file = os.open(self._name, flags, 0o664, dir_fd=folder)
            try:
                while content:
                    content = content[os.write(file, content) :]
            finally:
                os.close(file)
        self._is_torn = False


def read_events(directory: epath.Path) -> dict[str, list[Event]]:
    """Run -> its events, as they were told; the runs as they began. {} where nothing was recorded.

    Of more than runs write the newest files are read: 64 MiB and 500,000 lines, and no further.

    Raises:
      OSError: and errors of a bucket's clients.
    """
    files: list[tuple[str, dict[bytes, Event]]] = []
    num_bytes = num_lines = 0
    for name, content in _newest_first(directory / FOLDER):
        lines = content.splitlines()[num_lines - _MAX_ALL_LINES :]
        found = {line: event for line in lines if (event := Event.of_line(line)) is not None}
        files.append((_run_of(name), found))
        num_bytes += len(content)
        num_lines += len(lines)
        if num_bytes >= _MAX_ALL_BYTES or num_lines >= _MAX_ALL_LINES:
            logger.warning("%s: more events than runs write; only the newest are read", directory)
            break
    runs: dict[str, dict[bytes, Event]] = {}
    for run, found in reversed(files):
        if found:  # by their lines: an append that failed half-way was made again
            runs.setdefault(run, {}).update(found)
    return {run: list(found.values()) for run, found in runs.items()}


def _newest_first(folder: epath.Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files, of which only a few are in memory at a time."""
    names = sorted(_names(folder), reverse=True)[:MAX_FILES]
    with concurrent.futures.ThreadPoolExecutor() as pool:  # each is a round trip to a bucket
        for start in range(0, len(names), _AT_ONCE):
            some = names[start : start + _AT_ONCE]
            yield from zip(some, pool.map(lambda n: _read(folder, n), some), strict=True)


def latest_start(directory: epath.Path) -> Event | None:
    """The first event of the newest run that is still there; reads one file.

    Raises:
      OSError: and errors of a bucket's clients.
    """
    folder = directory / FOLDER
    names = sorted(_names(folder))
    if not names:
        return None
    first = next(name for name in names if _run_of(name) == _run_of(names[-1]))
    events = map(Event.of_line, _read(folder, first).splitlines())
    return next((event for event in events if event and event.name == "started"), None)


def _run_of(name: str) -> str:
    match = _NAME.fullmatch(name)
    assert match is not None
    return match[2]


def _names(folder: epath.Path) -> list[str]:
    try:
        if location.is_bucket(folder):
            found = [child.name for child in folder.iterdir()]
        else:
            with _opened(folder) as opened:
                found = os.listdir(opened)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [name for name in found if _NAME.fullmatch(name)]


def _read(folder: epath.Path, name: str) -> bytes:
    """What a file holds, as far as it is read; b"" of what is no file, or gone."""
    try:
        if location.is_bucket(folder):
            with (folder / name).open("rb") as file:
                return file.read(_MAX_READ_BYTES)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with _opened(folder) as opened, os.fdopen(os.open(name, flags, dir_fd=opened), "rb") as f:
            return f.read(_MAX_READ_BYTES) if stat.S_ISREG(os.fstat(f.fileno()).st_mode) else b""
    except Exception as error:  # the rest still tells something
        logger.info("%s is left out: %s", folder / name, error)
        return b""


@contextlib.contextmanager
def _opened(folder: epath.Path) -> Iterator[int]:
    """The folder, if it is one and no link to one."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield opened
    finally:
        os.close(opened)
