"""Creates files and folders that are never writable by everybody, whatever the umask is.

Orbax and TensorStore create files and folders with the modes that the umask allows. The umask
belongs to the whole process, so a change of the umask during a save would affect files that other
threads create at that time. A save therefore leaves the umask as it is, and writes its step in a
folder that only the owner can enter. Before a step's folder gets its final name, the save removes
everybody's write permission (the mode's ``o+w``) inside the folder, and gives the folder itself the
mode of its inner folders, so that other users can enter it if the umask allows this.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
import uuid

from etils import epath

from torchax_ckpt.storage.medium import fsync, location

PROBE = "probe"


def make_folder(path: epath.Path) -> None:
    """Creates a folder and its missing parents; the new folders are not writable by everybody."""
    if location.is_bucket(path):
        path.mkdir(parents=True, exist_ok=True)
        return
    for folder in reversed((path, *path.parents)):
        if not folder.exists():
            folder.mkdir(mode=0o775, exist_ok=True)
            # This user may be allowed to add entries to the parent, but not to list it.
            with contextlib.suppress(PermissionError):
                fsync.sync(folder.parent)


def write_file(path: pathlib.Path, content: bytes) -> None:
    """Creates a new file that is never writable by everybody; follows no link of this name."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o664)) as file:
        file.write(content)


def make_file(path: epath.Path) -> None:
    """Creates an empty file, if it is missing; the new file is not writable by everybody."""
    if location.is_bucket(path):
        path.write_text("")
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(path, flags, 0o664))


def prove_writable(folder: epath.Path, draft_suffix: str) -> None:
    """Creates and removes a file, whose name has a suffix that a later cleanup looks for."""
    if location.is_bucket(folder):
        probe = folder / ".torchax_ckpt_write_test"
        probe.write_text("")
        probe.unlink(missing_ok=True)  # a retried request may find it deleted already
        return
    # With a random name, under which nobody can have placed a link.
    path = pathlib.Path(folder / f"{PROBE}-{uuid.uuid4().hex}{draft_suffix}")
    write_file(path, b"")
    path.unlink()


def make_closed_folder(step: epath.Path) -> None:
    """Creates a step's folder, which other users cannot enter until ``open_folder``."""
    if not location.is_bucket(step):
        step.mkdir(mode=0o700)


def open_folder(step: epath.Path) -> None:
    """Lets other users enter a step's folder, as the modes of its inner folders say."""
    if location.is_bucket(step):
        return
    for folder, folders, files in os.walk(step):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            mode = stat.S_IMODE(os.lstat(path).st_mode)
            if mode & stat.S_IWOTH:
                os.chmod(path, mode & ~stat.S_IWOTH)
    # The inner folders have the mode that the umask or an access control list gives.
    with os.scandir(step) as entries:
        inner = next(entry for entry in entries if entry.is_dir())
        os.chmod(step, stat.S_IMODE(inner.stat().st_mode))
