"""The files of databases of unchanged arrays: compared with those before, and kept for later steps.

A database that has lost a file of array data still has its index, so nothing but a read of the
arrays would notice the loss. A listing of the files shows it.

    DIRECTORY/unchanged/state/ocdbt.process_unchanged0/   a database that no step has any more

Two steps that are kept one after the other use different copies (``layout/unchanged.py``). If only
one step is kept, the copy that the next step needs would vanish with the last step that has it, so
the folder ``unchanged`` retains it. The folder is not a step: its name is not a number, and it has
no commit mark. Only the program that made it takes anything over from it. A bucket has none.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from etils import epath

from torchax_ckpt.layout import unchanged
from torchax_ckpt.storage.directory.committed_step import STATE, CommittedStep
from torchax_ckpt.storage.medium import bucket, containment, fsync, links, location

RETAINED = "unchanged"
"""The name of the folder, in the directory of a run, of databases that no step has any more."""


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


def retain(
    directory: epath.Path,
    committed: CommittedStep,
    folders: Iterable[str],
    fence: Callable[[], None],
) -> None:
    """Replaces what a run's directory retains by databases of a step, as links.

    ``folders`` are those of the databases; ``fence`` raises if this program may no longer write.
    Raises OSError if the files cannot be linked.
    """
    draft = directory / f"writing-{committed.step}-{RETAINED}"  # a name that a cleanup knows
    if draft.exists():
        draft.rmtree()
    try:
        for name in folders:
            links.link_folder(committed.path / STATE / name, draft / STATE / name, may_copy=False)
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
    if {child.name for child in path.iterdir()} <= {STATE}:  # else it is not ours
        fence()
        doomed = directory / f"deleting-0-{RETAINED}"
        if doomed.exists():
            doomed.rmtree()
        path.rename(doomed)
        doomed.rmtree()
