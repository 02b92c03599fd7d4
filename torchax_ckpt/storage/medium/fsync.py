"""Syncs files and folders, so that they survive a loss of power.

TensorStore syncs each file that it writes, and the folder that holds the file, before it reports
that the file is written (its setting ``file_io_sync`` is on by default). Orbax syncs neither the
files that it writes without TensorStore nor the folders above them. A bucket needs no sync,
because it answers a write only after it has stored the object.
"""

from __future__ import annotations

import concurrent.futures
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etils import epath

from torchax_ckpt.storage.medium import location

# The errors of file systems that cannot sync a folder; most of these do not need it.
_NOT_FOR_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
# The number of parallel syncs: a disk stores several small files as fast as one.
_AT_A_TIME = 16


def sync_tree(top: epath.Path, *, but: str = "") -> None:
    """Syncs a folder and everything in it, but not its name, which is stored in the folder above.

    The files in folders named ``but`` are synced already; there may be thousands, of all hosts.
    """
    if location.is_bucket(top):
        return
    with concurrent.futures.ThreadPoolExecutor(_AT_A_TIME) as pool:
        list(pool.map(sync, _within(os.fspath(top), but)))


def sync(path: Any) -> None:
    """Syncs a file's content, or the names of a folder's entries without their content."""
    if location.is_bucket(path):
        return
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS or not os.path.isdir(path):
            raise
    finally:
        os.close(opened)


def swap_in(partial: Path, final: Path) -> None:
    """Gives a file or folder its final name; a loss of power leaves all of its content or no name.

    A file that has this name is replaced.
    """
    for path in _within(os.fspath(partial), "") if partial.is_dir() else (partial,):
        sync(path)
    partial.replace(final)
    sync(final.parent)


def _within(top: str, but: str) -> Iterator[str]:
    for folder, _, files in os.walk(top, onerror=_raise):
        if os.path.basename(folder) != but:
            yield from (os.path.join(folder, name) for name in files)
        yield folder


def _raise(error: OSError) -> None:
    raise error  # else ``os.walk`` leaves out a folder that it cannot list
