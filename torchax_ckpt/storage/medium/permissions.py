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
import uuid
from collections.abc import Iterator

from etils import epath

from torchax_ckpt.storage.medium import fsync, location

PROBE = "probe"


def make_folder(path: epath.Path) -> None:
    """Creates a folder and those above it, if they are not there, closed to everybody's writing."""
    if location.is_bucket(path):
        path.mkdir(parents=True, exist_ok=True)
        return
    for folder in reversed((path, *path.parents)):
        if not folder.exists():
            folder.mkdir(mode=0o775, exist_ok=True)
            with contextlib.suppress(PermissionError):  # one may add to it, but not list it
                fsync.sync(folder.parent)


def write_file(path: pathlib.Path, content: bytes) -> None:
    """Creates a file, closed to everybody's writing from its first moment.

    Raises:
      FileExistsError: there is one, or a link, which is not followed.
    """
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o664)) as file:
        file.write(content)


def make_file(path: epath.Path) -> None:
    """Creates an empty file if it is not there, closed to everybody's writing."""
    if location.is_bucket(path):
        path.write_text("")
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(path, flags, 0o664))


def prove_writable(folder: epath.Path, draft_suffix: str) -> None:
    """Creates a file in a folder and removes it; the suffix marks what a killed process leaves.

    Raises:
      OSError: it cannot be written.
    """
    if location.is_bucket(folder):
        probe = folder / ".torchax_ckpt_write_test"
        probe.write_text("")
        probe.unlink(missing_ok=True)  # a lost answer, and the request was sent again
        return
    # Of a name that nobody can have put a link under.
    path = pathlib.Path(folder / f"{PROBE}-{uuid.uuid4().hex}{draft_suffix}")
    write_file(path, b"")
    path.unlink()


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
