"""Checks files before a reader opens them, because anybody may have written these files."""

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
    """Raises ValueError unless the path is a regular file, or a link to one, of ``max_bytes``.

    A read from a pipe can block forever, and a read from a device may never end.
    """
    status = path.stat(follow_symlinks=may_be_link)
    if not stat.S_ISREG(status.st_mode):
        kind = "symbolic link" if stat.S_ISLNK(status.st_mode) else "folder or special file"
        raise ValueError(f"{path.name!r:.80}: expected a regular file, found a {kind}")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ValueError(
            f"{path.name!r:.80}: expected at most {max_bytes} bytes, found a file of "
            f"{status.st_size} bytes"
        )


def in_folder(folder: Path, name: Any) -> Path:
    """Returns the path of a file in a folder; raises ValueError if the name leads elsewhere."""
    if type(name) is not str:
        raise ValueError(
            "expected a string as the name of each file that the checkpoint lists, found a "
            f"{type(name).__name__}"
        )
    if Path(name).name != name or name in ("", ".."):
        raise ValueError(f"{name!r:.80} is not a file name")
    return folder / name


@contextlib.contextmanager
def reading_file(
    path: Path, expected: str, *, may_be_link: bool = False, max_bytes: int | None = None
) -> Iterator[None]:
    """Checks a file with ``require_regular``, and turns errors of the block, which reads the file.

    An OSError becomes a DirectoryError (not now), another error a CorruptCheckpointError.
    """
    try:
        require_regular(path, may_be_link=may_be_link, max_bytes=max_bytes)
        yield
    except OSError as error:
        raise DirectoryError(f"{path} cannot be read: {error}", path=path) from error
    except CheckpointError:
        raise
    except Exception as error:  # zipfile's errors, and type errors from unexpected records
        raise CorruptCheckpointError(
            f"{path}: expected {expected}: {error!s:.200}", path=path
        ) from error
