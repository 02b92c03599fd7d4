"""Checks, before a step's files are opened, that it has only regular files of expected sizes.

A directory from an unknown source is untrusted data. Orbax and TensorStore follow links, so this
package examines the files before it reads them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from etils import epath

from torchax_ckpt.errors import CheckpointError, CorruptCheckpointError, OutOfMemoryError
from torchax_ckpt.runtime import host_memory
from torchax_ckpt.storage.medium import seals, storage_errors

# The name of the folders that hold array data.
_DATA_FOLDER = "d"
# What Git LFS keeps in place of a large file begins so.
_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_POINTER_BYTES = 1024
POINTER = (
    "found a pointer of Git LFS in place of the file. Fetch the files: run `git lfs pull` in the "
    "clone, or download them"
)


def require_contained(step_path: epath.Path, step: int) -> None:
    """Refuses a local step that holds a link, a special file, or a file that is too large."""
    try:
        found = list(walk(step_path))
    except OSError as error:  # the step was deleted meanwhile
        if storage_errors.is_unavailable(error):
            raise
        raise corrupt(step, step_path, "a folder that can be read", str(error)) from error
    memory = host_memory.host_memory_bytes()
    for path, status in found:
        if not stat.S_ISREG(status.st_mode):
            kind = "symbolic link" if stat.S_ISLNK(status.st_mode) else "special file"
            raise corrupt(step, path, "folders and regular files", f"a {kind}", file=path)
        in_data = os.path.basename(os.path.dirname(path)) == _DATA_FOLDER
        if in_data and status.st_size > memory:
            on_storage = status.st_blocks * 512  # holes in a file take no space
            raise too_large(step, path, "a file", status.st_size, status.st_size, on_storage)
        if not in_data and status.st_size > seals.MAX_JSON_BYTES:
            expected = f"at most {seals.MAX_JSON_BYTES} bytes"
            raise corrupt(step, path, expected, f"{status.st_size}", file=path)


def walk(top: str | os.PathLike[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yields path and status of all non-folders at and below a path; does not follow links."""
    folders = [os.fspath(top)]
    while folders:
        folder = folders.pop()
        status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode):
            yield folder, status
            continue
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    yield entry.path, entry.stat(follow_symlinks=False)


def is_pointer(path: str | os.PathLike[str]) -> bool:
    """Returns whether a local file is what Git LFS keeps in place of a large file."""
    return beginning(path, len(_POINTER)) == _POINTER


def beginning(path: str | os.PathLike[str], num_bytes: int) -> bytes:
    """Returns the first bytes of a local file; b"" if it is not regular or cannot be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return b""
        with open(path, "rb") as file:
            return file.read(num_bytes)
    except OSError:  # another error is being reported
        return b""


def pointer_in(step_path: epath.Path) -> str | None:
    """Returns the first file of a local step that is a pointer of Git LFS; None without one."""
    small = (path for path, status in walk(step_path) if status.st_size <= _MAX_POINTER_BYTES)
    return next((path for path in sorted(small) if is_pointer(path)), None)


def too_large(
    step: int,
    path: str | os.PathLike[str],
    what: str,
    needed: int,
    least: int,
    on_storage: int,
    name: str | None = None,
) -> CheckpointError:
    """Returns the error for what is beyond host memory: damage if storage has under ``least``."""
    expected = f"{what} that this host can hold, {host_memory.host_memory_bytes()} bytes"
    found = f"{needed} bytes"
    if on_storage < least:
        found += f", which is impossible: only {on_storage} bytes are on storage"
        return corrupt(step, path, expected, found, name)
    leaf = "" if name is None else f"{name}: "
    return OutOfMemoryError(
        f"step {step} in {os.fspath(path)}: {leaf}expected {expected}, found {found}. The step may "
        "be sound: read it on a host with more memory, or ask for less of it at a time, as arrays "
        "sharded over devices.",
        step=step,
        path=path,
        key_path=name,
    )


def corrupt(
    step: int,
    path: str | os.PathLike[str],
    expected: str,
    found: str,
    name: str | None = None,
    file: str | None = None,
) -> CorruptCheckpointError:
    """Returns the error for a damaged file or array: the message says what was expected."""
    leaf = "" if name is None else f"{name}: "
    return CorruptCheckpointError(
        f"step {step} in {os.fspath(path)}: {leaf}expected {expected}, found {found}",
        step=step,
        path=path,
        file=file,
        key_path=name,
    )
