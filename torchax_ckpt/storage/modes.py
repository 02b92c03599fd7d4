"""Owns who may write what is created here: never everybody, whatever the umask of the process.

Orbax and TensorStore create files and folders with whatever modes the umask leaves. The umask is
the whole process's, so changing it around a save would change what other threads create meanwhile.
Instead a step is written in a folder that only its owner enters, and opened to others when nothing
in it can be written by everybody any more, before it gets its name.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
from collections.abc import Iterator

from etils import epath

from torchax_ckpt.storage import location


def make_folder(path: epath.Path) -> None:
    """Creates a folder and those above it, if they are not there, closed to everybody's writing."""
    if location.is_bucket(path):
        path.mkdir(parents=True, exist_ok=True)
        return
    for folder in reversed((path, *path.parents)):
        if not folder.exists():
            folder.mkdir(mode=0o775, exist_ok=True)


def write_file(path: pathlib.Path, content: bytes) -> None:
    """Creates a file, closed to everybody's writing from its first moment."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o664)) as file:
        file.write(content)


def make_file(path: epath.Path) -> None:
    """Creates an empty file if it is not there, closed to everybody's writing."""
    if location.is_bucket(path):
        path.write_text("")
        return
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o664))


@contextlib.contextmanager
def closed_while_written(step: epath.Path, *, opens: bool = True) -> Iterator[int | None]:
    """Gives the mode to create a step's folder with, None for the default, and opens it at the end.

    Until then only its owner enters; a process that is killed leaves it so. Of several processes
    that write it together, one opens it.
    """
    if location.is_bucket(step):
        yield None
        return
    yield 0o700
    if not opens:
        return
    for folder, folders, files in os.walk(step):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            mode = stat.S_IMODE(os.lstat(path).st_mode)
            if mode & stat.S_IWOTH:
                os.chmod(path, mode & ~stat.S_IWOTH)
    # What the umask, or an access control list, makes of a folder shows in those within.
    with os.scandir(step) as entries:
        inner = next(entry for entry in entries if entry.is_dir())
        os.chmod(step, stat.S_IMODE(inner.stat().st_mode))
