"""The files of databases of unchanged arrays: taken over by later steps, compared and retained.

A later step takes the files over without writing their bytes again: as hard links or, in a bucket,
as objects that the service copies. A database that has lost a file of array data still has its
index, so only a listing of the files, or a read of the arrays, shows the loss.

    DIRECTORY/unchanged/state/ocdbt.process_unchanged0/   a database that no step has any more

Two steps that are kept one after the other use different copies (``layout/unchanged.py``). If only
one step is kept, the copy that the next step needs would vanish with the last step that has it, so
the folder ``unchanged`` retains it, except in a bucket. It is no step: its name is no number, and
it has no commit mark. Only the program that made it takes anything over from it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from etils import epath

from torchax_ckpt.layout import unchanged
from torchax_ckpt.runtime.stages import stage
from torchax_ckpt.storage.directory.committed_step import STATE, CommittedStep
from torchax_ckpt.storage.medium import bucket, containment, fsync, location

logger = logging.getLogger(__name__)

RETAINED = "unchanged"
"""The name of the folder, in the directory of a run, of databases that no step has any more."""

# What file systems answer that have no hard links, allow none here, or too few for one file.
_REFUSALS = {
    *(errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK),
    *(errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL),
}
_has_warned = False


class File(NamedTuple):
    """A file of a database: its bytes, and in a bucket what the service says of their content."""

    size: int
    crc32c: str = ""


def present(state: epath.Path) -> dict[str, File]:
    """Returns the files of a step's databases, by name below ``state``; {} if there is no step."""
    if location.is_bucket(state):
        listed = bucket.contents(state, unchanged.FOLDER_PREFIX)
        return {name: File(*content) for name, content in listed.items()}
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for folder in os.listdir(state):
            if folder.startswith(unchanged.FOLDER_PREFIX):
                for path, status in containment.walk(state / folder):
                    found[os.path.relpath(path, state)] = File(status.st_size)
    return found


def differing(known: Mapping[str, File], here: Mapping[str, File]) -> Iterator[str]:
    """Yields in words how known files differ; names the folder if nothing of it is left."""
    folders = {name.partition("/")[0] for name in here}
    gone = {folder for name in known if (folder := name.partition("/")[0]) not in folders}
    for folder in sorted(gone):
        yield f"{folder} is gone"
    for name, before in known.items():
        if name.partition("/")[0] in gone:
            continue
        if (found := here.get(name)) is None:
            yield f"{name} is gone"
        elif found.size != before.size:
            yield f"{name} has {found.size} bytes in place of {before.size}"
        elif found != before:
            yield f"{name} has CRC32C {found.crc32c} in place of {before.crc32c}"


def take_over(source: epath.Path, target: epath.Path) -> None:
    """Creates a folder that has the files of another folder on the same medium, at any depth."""
    if location.is_bucket(source):
        bucket.copy(source, target)
    else:
        link_folder(source, target)


@stage("link unchanged arrays")
def link_folder(source: epath.Path, target: epath.Path, *, may_copy: bool = True) -> None:
    """Creates a folder whose files are hard links to another folder's files, at any depth.

    The names of the new files are durable then, but not that of ``target`` in the folder above.
    """
    for folder, _, files in os.walk(source, onerror=fsync.raise_error):
        new = os.path.join(target, os.path.relpath(folder, source))
        os.makedirs(new, exist_ok=True)
        for name in files:
            link_file(os.path.join(folder, name), os.path.join(new, name), may_copy=may_copy)
        fsync.sync(new)


def link_file(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, may_copy: bool = True
) -> None:
    """Gives a file a second name, not yet durable; copies it if the file system refuses links."""
    if not stat.S_ISREG(os.lstat(source).st_mode):
        raise OSError(errno.ELOOP, "expected a regular file", os.fspath(source))
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _REFUSALS or not may_copy:
            raise
        global _has_warned
        if not _has_warned:
            _has_warned = True
            logger.warning(
                "%s: cannot be linked from %s (%s). Unchanged arrays are copied from step to step "
                "in place of links, which takes time and space. Use a file system with hard links, "
                "or CheckpointOptions(reuse=False)",
                os.fspath(target),
                os.fspath(source),
                error.strerror,
            )
        shutil.copyfile(source, target, follow_symlinks=False)
        fsync.sync(epath.Path(target))


def retain(
    directory: epath.Path,
    committed: CommittedStep,
    folders: Iterable[str],
    fence: Callable[[], None],
) -> None:
    """Replaces what a run's directory retains by links to databases of a step; else OSError."""
    draft = directory / f"writing-{committed.step}-{RETAINED}"  # a name that a cleanup knows
    if draft.exists():
        draft.rmtree()
    try:
        for name in folders:
            link_folder(committed.path / STATE / name, draft / STATE / name, may_copy=False)
        for new in (draft / STATE, draft):
            fsync.sync(new)
    except OSError:
        draft.rmtree(missing_ok=True)
        raise
    remove_retained(directory, fence)
    fence()
    draft.rename(directory / RETAINED)
    fsync.sync(directory)


def remove_retained(directory: epath.Path, fence: Callable[[], None]) -> None:
    """Removes what a run's directory retains, if anything; ``fence`` as for ``retain``."""
    if location.is_bucket(directory):
        return
    path = pathlib.Path(directory / RETAINED)
    if path.is_symlink() or not path.is_dir():
        return
    names = os.listdir(path / STATE) if os.listdir(path) == [STATE] else []
    if names and all(
        name.startswith(unchanged.FOLDER_PREFIX) for name in names
    ):  # else it is not ours
        fence()
        doomed = directory / f"deleting-0-{RETAINED}"
        if doomed.exists():
            doomed.rmtree()
        path.rename(doomed)
        doomed.rmtree()
