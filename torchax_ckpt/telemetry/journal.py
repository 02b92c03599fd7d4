"""Writes and reads the journal, the events of runs as files of JSON lines in ``DIRECTORY/events``.

The name of a file, such as ``1732201234123456789-5f0c2a9e.jsonl``, consists of the file's time of
creation in nanoseconds and the identifier of its run.

Each run appends only to files that it created. A process that is killed in the middle of a line
spoils only that line. At 64 KiB, the run starts a new file, and deletes the oldest, also those of
earlier runs, so that at most 512 remain. On a bucket, which has no appends, it rewrites its
current file. The journal does not sync its files, because no save should wait for events.

The files are untrusted, so the reader opens only regular files and limits how much it reads.
"""

from __future__ import annotations

import concurrent.futures
import logging
import re
import time
from collections.abc import Iterator, Sequence

from etils import epath

from torchax_ckpt.storage.medium import medium
from torchax_ckpt.storage.medium.stored_file import Log
from torchax_ckpt.telemetry.events import Event

logger = logging.getLogger(__name__)

FOLDER = "events"
MAX_FILES = 512
MAX_FILE_BYTES = 64 << 10
# The lines of the last append may exceed ``MAX_FILE_BYTES``.
_MAX_READ_BYTES = 16 * MAX_FILE_BYTES
# For all files together. Runs write fewer bytes, and the events of so many still fit into memory.
_MAX_ALL_BYTES = 64 << 20
_MAX_ALL_LINES = 500_000
_CONCURRENT_READS = 32
_NAME = re.compile(r"\d{19}-[0-9a-f]{8}\.jsonl")


class Journal:
    """Appends the events of a run, named by eight hexadecimal digits, to files in ``directory``."""

    def __init__(self, directory: epath.Path, run: str) -> None:
        self._folder = directory / FOLDER
        self._run = run
        self._medium = medium.of(directory)
        self._log: Log | None = None
        self._size = 0

    @property
    def patience_secs(self) -> float:
        """Seconds between two appends."""
        return self._medium.pause_secs

    def append(self, lines: Sequence[bytes]) -> None:
        """Appends lines, each with its newline; if it fails, some of them may have been written."""
        content = b"".join(lines)
        if self._log is None or self._size >= MAX_FILE_BYTES:
            self._log = self._begun()
        self._log.append(content)
        self._size += len(content)

    def _begun(self) -> Log:
        log = self._medium.new_log(self._folder / f"{time.time_ns():019d}-{self._run}.jsonl")
        for name in sorted(_names(self._folder))[: 1 - MAX_FILES]:
            self._medium.remove_file(self._folder / name)
        self._size = 0
        return log


def read_events(directory: epath.Path) -> dict[str, list[Event]]:
    """Returns each run's name and its events in order; if there are too many, the newest only."""
    files: list[tuple[str, dict[bytes, Event]]] = []
    num_bytes = num_lines = 0
    for name, content in _newest_first(directory / FOLDER):
        lines = content.splitlines()[num_lines - _MAX_ALL_LINES :]
        of_file = {line: event for line in lines if (event := Event.of_line(line)) is not None}
        files.append((_run_of(name), of_file))
        num_bytes += len(content)
        num_lines += len(lines)
        if num_bytes >= _MAX_ALL_BYTES or num_lines >= _MAX_ALL_LINES:
            logger.info("%s: more events than runs write; only the newest are read", directory)
            break
    runs: dict[str, dict[bytes, Event]] = {}
    for run, of_file in reversed(files):
        if of_file:  # keyed by line, because a repeated append may have written a line twice
            runs.setdefault(run, {}).update(of_file)
    return {run: list(of_run.values()) for run, of_run in runs.items()}


def _newest_first(folder: epath.Path) -> Iterator[tuple[str, bytes]]:
    """Yields name and content of the newest journal files, newest first; reads 32 at a time."""
    names = sorted(_names(folder), reverse=True)[:MAX_FILES]
    with concurrent.futures.ThreadPoolExecutor() as pool:  # each read is a round trip to a bucket
        for start in range(0, len(names), _CONCURRENT_READS):
            some = names[start : start + _CONCURRENT_READS]
            yield from zip(some, pool.map(lambda n: _read(folder, n), some), strict=True)


def latest_start(directory: epath.Path) -> Event | None:
    """Returns the ``started`` event of the newest run, from the oldest file that is left of it."""
    folder = directory / FOLDER
    names = sorted(_names(folder))
    if not names:
        return None
    first = next(name for name in names if _run_of(name) == _run_of(names[-1]))
    events = map(Event.of_line, _read(folder, first).splitlines())
    return next((event for event in events if event and event.name == "started"), None)


def latest_mirrored(directory: epath.Path) -> Event | None:
    """Returns the last event with the newest step of a mirror, if the newest journal files have it.

    Copies are rarer than saves, but there are many saves in so many files.
    """
    names = sorted(_names(directory / FOLDER), reverse=True)[:_CONCURRENT_READS]
    for name in names:
        events = map(Event.of_line, reversed(_read(directory / FOLDER, name).splitlines()))
        if found := next((e for e in events if e and "mirrored_step" in e.values), None):
            return found
    return None


def _run_of(name: str) -> str:
    return name.removesuffix(".jsonl").partition("-")[2]


def _names(folder: epath.Path) -> list[str]:
    return [name for name in medium.of(folder).names_in(folder) if _NAME.fullmatch(name)]


def _read(folder: epath.Path, name: str) -> bytes:
    """Returns the beginning of a file; b"" if the file is unreadable or not regular."""
    try:
        return medium.of(folder).read(folder / name, _MAX_READ_BYTES)
    except Exception as error:  # the other files may still be readable
        logger.debug("%s cannot be read and is skipped: %s", folder / name, error)
        return b""
