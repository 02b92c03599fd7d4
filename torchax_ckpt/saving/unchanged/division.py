"""Divides the arrays of a save: some are taken over, some written to databases of their own."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterator, Mapping

import numpy as np
from etils import epath

from torchax_ckpt.layout import unchanged
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.layout.unchanged import Database, Digests
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.saving.unchanged import ledger
from torchax_ckpt.saving.unchanged.ledger import Entry
from torchax_ckpt.storage.arrays import chunking
from torchax_ckpt.storage.arrays.chunking import AnyArray
from torchax_ckpt.storage.medium.stored_file import StoredFile

# Smaller arrays share a database, because each database takes some milliseconds. If one array of a
# database changes, all of its arrays are written again. On several processes, this is the most that
# one process writes to a database.
_DATABASE_BYTES = 64 << 20


@dataclasses.dataclass
class Division:
    """Which arrays of a save are stored in databases of unchanged arrays, by stored names."""

    copy: int = 0  # which of the two copies of the unchanged arrays the step has
    databases: dict[str, Database] = dataclasses.field(default_factory=dict)
    # Stored name -> folder, for the arrays in these databases that this process writes.
    folders: dict[str, str] = dataclasses.field(default_factory=dict)
    # The arrays whose database the save takes over, and their digests, as known to this process.
    linked: set[str] = dataclasses.field(default_factory=set)
    digests: dict[str, Digests] = dataclasses.field(default_factory=dict)
    # What this process takes over: the folder in the earlier step, and the new folder's name.
    links: list[tuple[epath.Path, str]] = dataclasses.field(default_factory=list)
    # The files of all links; on process 0 only.
    files: dict[str, StoredFile] = dataclasses.field(default_factory=dict)

    def take_over(
        self,
        base: Entry,
        equal: int,
        source: epath.Path,
        arrays: Collection[str],
        here: Mapping[str, AnyArray],
        processes: Processes,
    ) -> None:
        """Adds the databases of an earlier step, in the folder ``source``, that have a bit set.

        The processes share their folders, whoever wrote them; process 0 takes those of host arrays.
        """
        files = collections.defaultdict[str, dict[str, StoredFile]](dict)  # by folder
        for path, file in base.files.items():
            folder, _, rest = path.partition("/")
            files[folder][rest] = file
        num_folders = 0
        for number, (old, database) in enumerate(base.databases.items()):
            if not equal >> number & 1:
                continue
            name = unchanged.name_of(len(self.databases))
            self.databases[name] = Database(self.copy, database.arrays, database.processes)
            self.linked.update(database.arrays)
            on_host = ledger.are_on_host(database.arrays, arrays, here)
            for folder, new in zip(
                unchanged.folders_of(old, database.processes),
                unchanged.folders_of(name, database.processes),
                strict=True,
            ):
                index = 0 if on_host else num_folders % processes.count
                num_folders += not on_host
                if index == processes.index:
                    self.links.append((source / folder, new))
                self.files |= {f"{new}/{rest}": file for rest, file in files[folder].items()}
        known = base.contents.keys() & self.linked
        self.digests |= {n: base.contents[n].digests for n in known}

    def write(
        self,
        plan: Plan,
        arrays: Mapping[str, AnyArray],
        here: Mapping[str, AnyArray],
        apart: frozenset[str],
        processes: Processes,
    ) -> None:
        """Adds databases of the other arrays that are ``apart``, those of host arrays last."""
        index = processes.index if processes.count > 1 else None
        still = {
            name: array
            for name, array in arrays.items()
            if name not in self.linked and apart.issuperset(ledger.members_of(plan, name))
        }
        for names in grouped(still, here):
            name = unchanged.name_of(len(self.databases))
            writers = None
            if processes.count > 1:
                writers = tuple(sorted(frozenset[int]().union(*(_writers(n, here) for n in names))))
            self.databases[name] = Database(self.copy, names, writers)
            self.folders |= {n: unchanged.folder_of(name, index) for n in names if n in here}


def grouped(
    arrays: Mapping[str, AnyArray], here: Mapping[str, AnyArray]
) -> Iterator[tuple[str, ...]]:
    """Yields the names of arrays that share a database: either device arrays or host arrays.

    No process writes more of one than the limit, except of a database of one array.
    """
    for on_host in (False, True):
        part: list[str] = []
        written: collections.Counter[int] = collections.Counter()  # bytes of each process
        for name, array in arrays.items():
            if (name not in here or isinstance(here[name], np.ndarray)) != on_host:
                continue
            writers = _writers(name, here)
            share = array.size * array.dtype.itemsize // len(writers)
            if part and max(written[index] for index in writers) + share > _DATABASE_BYTES:
                yield tuple(part)
                part, written = [], collections.Counter()
            part.append(name)
            written.update(dict.fromkeys(writers, share))
        if part:
            yield tuple(part)


def _writers(name: str, here: Mapping[str, AnyArray]) -> frozenset[int]:
    return chunking.storing_processes(here[name]) if name in here else frozenset({0})
