"""The files of databases of frozen arrays, which later steps reuse: listed, compared and retained.

    DIRECTORY/unchanged/state/ocdbt.process_unchanged0/   a database that no step has any more

Two steps that are kept one after the other have different copies (``layout/unchanged.py``). If only
one step is kept, the copy that the next step needs would vanish with the last step that has it, so
the folder ``unchanged`` retains it, except in a bucket. It is no step: its name is no number, and
it has no commit mark. Only the program that made it reuses its files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping

from etils import epath

from torchax_ckpt.layout import unchanged
from torchax_ckpt.storage.directory.committed_step import STATE, CommittedStep
from torchax_ckpt.storage.medium import local_medium, medium
from torchax_ckpt.storage.medium.stored_file import StoredFile

RETAINED = "unchanged"
"""The name of the folder, in the directory of a run, of databases that no step has any more."""


def present(state: epath.Path) -> dict[str, StoredFile]:
    """Returns the files of a step's databases, by name below ``state``; {} if there is no step."""
    return {file.name: file for file in medium.of(state).files(state, unchanged.FOLDER_PREFIX)}


def differing(
    known: Mapping[str, StoredFile], here: Mapping[str, StoredFile], state: epath.Path
) -> Iterator[str]:
    """Yields in words which known files are gone or have changed, given those ``present`` now.

    A database that has lost a file of array data still has its index, so only a listing, or a read
    of the arrays, shows the loss.
    """
    for name, before in known.items():
        if (found := here.get(name)) is None:
            yield f"{state / name} is gone"
        elif found.num_bytes != before.num_bytes:
            yield f"{state / name} has {found.num_bytes} bytes in place of {before.num_bytes}"
        elif found.crc32c != before.crc32c:
            yield f"{state / name} has CRC32C {found.crc32c} in place of {before.crc32c}"


def retain(
    directory: epath.Path,
    committed: CommittedStep,
    folders: Iterable[str],
    fence: Callable[[], None],
) -> None:
    """Replaces what a run's directory retains by links to databases of a step; else OSError.

    Nothing need be whole after a crash, because the program that then comes reuses none of it.
    """
    remove_retained(directory, fence)
    fence()
    (directory / RETAINED).mkdir()  # fails if somebody else has such a folder
    for name in folders:
        source, target = committed.path / STATE / name, directory / RETAINED / STATE / name
        local_medium.link_folder(source, target, may_copy=False)


def remove_retained(directory: epath.Path, fence: Callable[[], None]) -> None:
    """Removes what a run's directory retains, if anything; ``fence`` as for ``retain``."""

    def is_ours(path: epath.Path) -> bool:
        names = os.listdir(path)
        names = os.listdir(path / STATE) if names == [STATE] else names
        return all(name.startswith(unchanged.FOLDER_PREFIX) for name in names)

    doomed = directory / f"deleting-0-{RETAINED}"
    medium.of(directory).remove_retained(directory / RETAINED, doomed, is_ours, fence)
