"""Owns that what was written survives a loss of power: it is on the medium, and its name as well.

TensorStore syncs each file that it writes, and the folder that it lies in, before it says that it
is written (``file_io_sync``, which is on unless a context says otherwise). Orbax syncs none of the
others, nor the folders above. A bucket answers a write once it is stored.
"""

from __future__ import annotations

import concurrent.futures
import errno
import os
from collections.abc import Iterator
from typing import Any

from etils import epath

from torchax_ckpt.storage.medium import location

# What file systems answer that cannot sync a folder; most of these need no such thing.
_NOT_FOR_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
# A disk stores several small files as fast as one.
_AT_A_TIME = 16


def sync_tree(top: epath.Path, *, but: str = "") -> None:
    """Syncs a folder with everything in it; its own name is in the folder above.

    Args:
      top: the folder.
      but: how folders are named whose files are synced already; there may be thousands, of other
        hosts as well, and each would be opened once more.

    Raises:
      OSError: the medium has failed to store something.
    """
    if location.is_bucket(top):
        return
    with concurrent.futures.ThreadPoolExecutor(_AT_A_TIME) as pool:
        list(pool.map(sync, _within(os.fspath(top), but)))


def sync(path: Any) -> None:
    """Syncs a file, or a folder: the names in it.

    Raises:
      OSError: the medium has failed to store it.
    """
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


def _within(top: str, but: str) -> Iterator[str]:
    for folder, _, files in os.walk(top):
        if os.path.basename(folder) != but:
            yield from (os.path.join(folder, name) for name in files)
        yield folder
