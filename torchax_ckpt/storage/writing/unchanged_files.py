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

import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from etils import epath

from torchax_ckpt.layout import unchanged
from torchax_ckpt.storage.directory.committed_step import STATE, CommittedStep
from torchax_ckpt.storage.medium import fsync, local_medium, medium
from torchax_ckpt.storage.medium.stored_file import StoredFile

RETAINED = "unchanged"
"""The name of the folder, in the directory of a run, of databases that no step has any more."""


def present(state: epath.Path) -> dict[str, StoredFile]:
    """Returns the files of a step's databases, by name below ``state``; {} if there is no step."""
    found = medium.of(state).files(state, unchanged.FOLDER_PREFIX)
    return {file.name: file for file in found}


def differing(known: Mapping[str, StoredFile], here: Mapping[str, StoredFile]) -> Iterator[str]:
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
        elif found.num_bytes != before.num_bytes:
            yield f"{name} has {found.num_bytes} bytes in place of {before.num_bytes}"
        elif found.crc32c != before.crc32c:
            yield f"{name} has CRC32C {found.crc32c} in place of {before.crc32c}"


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
            local_medium.link_folder(
                committed.path / STATE / name, draft / STATE / name, may_copy=False
            )
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
    if not medium.of(directory).has_links:
        return  # nothing was retained
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
