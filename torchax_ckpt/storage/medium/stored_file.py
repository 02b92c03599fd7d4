"""What both kinds of storage use: a file that is stored, a file that grows, a free name."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from etils import epath

# The file that Orbax writes last into a step: its commit mark. In a bucket it makes the step.
MARK = "commit_success.txt"
# Orbax's commit record, which has the time of the commit.
RECORD = "_CHECKPOINT_METADATA"


class StoredFile(NamedTuple):
    """A file below a folder, and what tells whether two of them are one, or have one content."""

    name: str  # the path below the folder
    num_bytes: int
    crc32c: str = ""  # what a bucket says of the content
    identity: tuple[int, int] | None = None  # device and inode, which are equal for links
    num_links: int = 1


class Log:
    """A file that grows by lines; a reader may find a part of those that were appended last."""

    def __init__(self, path: epath.Path) -> None:
        self._path = path
        self._is_torn = False

    def append(self, content: bytes) -> None:
        """Appends lines; if it fails, some of them may have been written."""
        if self._is_torn:
            content = b"\n" + content
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._is_torn = True
        with opened(self._path.parent) as folder:
            file = os.open(self._path.name, flags, 0o664, dir_fd=folder)
            try:
                while content:
                    content = content[os.write(file, content) :]
            finally:
                os.close(file)
        self._is_torn = False


@contextlib.contextmanager
def opened(folder: epath.Path) -> Iterator[int]:
    """Yields a file descriptor of a folder; raises OSError for a link."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield opened
    finally:
        os.close(opened)


def first_free(
    folder: epath.Path, names: Sequence[str], but: Collection[str] = (), num_used: int = 0
) -> epath.Path:
    """Returns the path of the first free name, which may be the last one with a number."""
    more = (f"{names[-1]}-{count}" for count in itertools.count(2))
    unused = itertools.islice(itertools.chain(names, more), num_used, None)
    paths = (folder / name for name in unused if name not in but)
    return next(p for p in paths if not (p.exists() or os.path.islink(p)))
