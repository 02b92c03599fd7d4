"""Syncs files and folders, so that they survive a loss of power.

TensorStore syncs each file that it writes, and the folder that holds the file, before it reports
that the file is written (its setting ``file_io_sync`` is on by default), but not the folders above.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etils import epath

from torchax_ckpt.runtime.background import Executor

# The errors of file systems that cannot sync a folder; most of these do not need it.
_NOT_FOR_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
# The number of parallel syncs: a disk stores several small files as fast as one.
_AT_A_TIME = 16


def sync_tree(top: epath.Path, *, but: str = "") -> None:
    """Syncs a folder and all in it, but not its name; folders named ``but`` are synced already."""
    with Executor(_AT_A_TIME) as pool:
        list(pool.map(sync, _within(os.fspath(top), but)))


def sync(path: Any) -> None:
    """Syncs a file's content, or the names of a folder's entries without their content."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS or not os.path.isdir(path):
            raise
    finally:
        os.close(opened)


def swap_in(partial: Path, final: Path) -> None:
    """Gives a file or folder its final name; a loss of power leaves all of it or no name."""
    for path in _within(os.fspath(partial), "") if partial.is_dir() else (partial,):
        sync(path)
    partial.replace(final)
    sync(final.parent)


@contextlib.contextmanager
def swapped_in(final: Path) -> Iterator[Path]:
    """Yields the temporary name of a file or folder, which gets its own after the block."""
    partial = final.with_name(f"{final.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        swap_in(partial, final)
    except BaseException:
        remove(partial)
        raise


def remove(path: Path) -> None:
    """Removes a file or folder, if there is one and storage allows it; for after a failure."""
    shutil.rmtree(path, ignore_errors=True)  # does nothing to a file or a link
    with contextlib.suppress(OSError):
        path.unlink()


def _within(top: str, but: str) -> Iterator[str]:
    for folder, _, files in os.walk(top, onerror=raise_error):
        if os.path.basename(folder) != but:
            yield from (os.path.join(folder, name) for name in files)
        yield folder


def raise_error(error: OSError) -> None:
    """For ``os.walk``, which would leave out a folder that it cannot list."""
    raise error
