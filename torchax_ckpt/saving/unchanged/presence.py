"""Compares the files of known databases with those on storage, before a save takes them over.

A database that has lost a file of array data still has its index, so nothing but a read of the
arrays would notice the loss. A listing of the files shows it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from etils import epath

from torchax_ckpt.errors import SaveError
from torchax_ckpt.layout import unchanged
from torchax_ckpt.layout.unchanged import Database
from torchax_ckpt.saving.unchanged.known_databases import KnownDatabase
from torchax_ckpt.storage.directory.committed_step import STATE
from torchax_ckpt.storage.writing import databases
from torchax_ckpt.storage.writing.databases import File

logger = logging.getLogger(__name__)

Files = Sequence[Mapping[str, File]]
"""The files of each folder of a database: name below the folder -> file."""


def whole(
    stored: Sequence[tuple[KnownDatabase, epath.Path]],
) -> list[tuple[KnownDatabase, epath.Path]]:
    """Returns the databases that have all their files; if these were not known, they are now.

    Logs once if some have lost files, or have files of other sizes or, in a bucket, other content.

    Args:
      stored: each database, and the path of its step.

    Raises:
      OSError: storage does not answer.
    """
    present = {path: databases.present(path / STATE) for path in {path for _, path in stored}}
    found, lacking = [], []
    for known, path in stored:
        here = files_of(known.name, known.processes, present[path])
        if differing := [*_differing(known.files, here)]:
            folders = unchanged.folders_of(known.name, known.processes)
            lacking += [f"{path / STATE / folders[n] / file} {how}" for n, file, how in differing]
        else:
            found.append((dataclasses.replace(known, files=known.files or here), path))
    if lacking:
        others = f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        logger.warning("%s%s: the unchanged arrays are written again", lacking[0], others)
    return found


def files_in(
    path: epath.Path, stored: Mapping[str, Database], taken: Iterable[KnownDatabase]
) -> dict[str, Files]:
    """Returns the files of each database in a new step: name of the database -> files.

    Args:
      path: the step.
      stored: name -> database, for all databases of unchanged arrays in the step.
      taken: the databases of earlier steps that the step takes over, with their files.

    Raises:
      SaveError: the step lacks files of such a database, or has files of other sizes or, in a
        bucket, other content.
      OSError: storage does not answer.
    """
    if not stored:
        return {}
    present = databases.present(path / STATE)
    sources = {frozenset(source.contents): source.files for source in taken}
    found = {}
    for name, database in stored.items():
        here = files_of(name, database.processes, present)
        known = sources.get(frozenset(database.arrays), ())
        found[name] = known or here  # a folder that is taken over may have files of others
        for number, file, how in _differing(known, here):
            folder = path / STATE / unchanged.folders_of(name, database.processes)[number]
            raise SaveError(
                f"{folder / file} {how} before the step was committed, so the step is not kept. "
                "Another program changes files of this run; keep it out of the directory"
            )
    return found


def files_of(
    name: str, processes: Sequence[int] | None, present: Mapping[str, Mapping[str, File]]
) -> Files:
    """Returns the files of a database, given those of all databases of its step.

    Args:
      name, processes: as in ``KnownDatabase``.
      present: the result of ``databases.present``.
    """
    return [present.get(folder, {}) for folder in unchanged.folders_of(name, processes)]


def _differing(known: Files, here: Files) -> Iterator[tuple[int, str, str]]:
    """Yields how the files of a database differ from those that it had.

    Args:
      known: the files that it had; empty if they are not known.
      here: the files that it has. Other files than the known ones do not count.

    Yields:
      The number of a folder; the name of a file in it, or "" if the folder has no database any
      more; and how it differs.
    """
    for number, files in enumerate(here):
        if not files:
            yield number, "", "is gone"
            continue
        for file, before in known[number].items() if known else ():
            if (found := files.get(file)) is None:
                yield number, file, "is gone"
            elif found.size != before.size:
                yield number, file, f"has {found.size} bytes in place of {before.size}"
            elif found != before:
                yield number, file, f"has CRC32C {found.crc32c} in place of {before.crc32c}"
