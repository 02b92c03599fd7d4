"""Owns what a file must be before a reader opens it: other programs wrote it, or anybody."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchax_ckpt.errors import CheckpointError, CorruptCheckpointError, DirectoryError
from torchax_ckpt.storage.medium import seals

MAX_METADATA_BYTES = seals.MAX_JSON_BYTES


def require_regular(path: Path, *, may_be_link: bool = False, max_bytes: int | None = None) -> None:
    """Refuses what must not be opened: a pipe blocks forever, a device has no end.

    Args:
      path: of the file.
      may_be_link: whether a symbolic link to a regular file will do, wherever it leads.
      max_bytes: the most that it may have, where all of it is to be read.

    Raises:
      ValueError: it is no regular file, or larger than that.
      OSError: it is not there, or cannot be looked at.
    """
    status = path.stat(follow_symlinks=may_be_link)
    if not stat.S_ISREG(status.st_mode):
        kind = "symbolic link" if stat.S_ISLNK(status.st_mode) else "folder or special file"
        raise ValueError(f"{path.name!r:.80}: expected a regular file, found a {kind}")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ValueError(
            f"{path.name!r:.80}: expected at most {max_bytes} bytes, found {status.st_size}"
        )


def in_folder(folder: Path, name: Any) -> Path:
    """The file of this name in a folder.

    Raises:
      ValueError: the name leads elsewhere, or is none.
    """
    if type(name) is not str:
        raise ValueError(f"expected the name of a file, found a {type(name).__name__}")
    if Path(name).name != name or name in ("", ".."):
        raise ValueError(f"{name!r:.80} is no name of a file")
    return folder / name


@contextlib.contextmanager
def reading_file(
    path: Path, expected: str, *, may_be_link: bool = False, max_bytes: int | None = None
) -> Iterator[None]:
    """Reads a file that another program should have written; what none has written is damage.

    Args:
      path: of the file, for ``require_regular``, as are ``may_be_link`` and ``max_bytes``.
      expected: what it should be, for messages.

    Raises:
      CorruptCheckpointError: it is something else.
      DirectoryError: it cannot be read now.
    """
    try:
        require_regular(path, may_be_link=may_be_link, max_bytes=max_bytes)
        yield
    except OSError as error:
        raise DirectoryError(f"{path} cannot be read: {error}", path=path) from error
    except CheckpointError:
        raise
    except Exception as error:  # zipfile's own, and what comes of taking records for others
        raise CorruptCheckpointError(
            f"{path}: expected {expected}: {error!s:.200}", path=path
        ) from error
