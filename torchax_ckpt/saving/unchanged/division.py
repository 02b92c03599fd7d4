"""Divides the arrays of a save: process 0 decides which databases of unchanged arrays it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from torchax_ckpt.errors import ProcessError
from torchax_ckpt.layout import unchanged
from torchax_ckpt.layout.digests import Digests
from torchax_ckpt.layout.unchanged import Database
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.saving.unchanged import index_runs
from torchax_ckpt.saving.unchanged.known_databases import Content, KnownDatabase
from torchax_ckpt.storage.arrays import chunking
from torchax_ckpt.storage.arrays.chunking import AnyArray
from torchax_ckpt.storage.directory.committed_step import STATE
from torchax_ckpt.storage.writing.databases import File


@dataclasses.dataclass(frozen=True)
class Division:
    """Which arrays of a save are stored in databases of unchanged arrays.

    Attributes:
      databases: the databases of the new step: name -> database.
      folders: stored name -> folder, for the arrays in these databases that the save writes.
      linked: the stored names of the arrays whose database the save takes over.
      links: what this process takes over: the folder in the earlier step, the new folder's name.
    """

    databases: Mapping[str, Database] = dataclasses.field(default_factory=dict)
    folders: Mapping[str, str] = dataclasses.field(default_factory=dict)
    linked: frozenset[str] = frozenset()
    links: Sequence[tuple[epath.Path, str]] = ()


@dataclasses.dataclass
class Decision:
    """The databases of unchanged arrays in a new step, as process 0 decided.

    Attributes:
      copy: which of the two copies the step has.
      entries: for each database its arrays, the processes that have folders of it as runs (None in
        a run of one process), the database that the step takes over (the name of the step's folder
        and the name of the database; or None), and whether the arrays are host arrays.
      digests: stored name -> digests, for the arrays whose database the save takes over.
    """

    copy: int
    entries: list[list[Any]] = dataclasses.field(default_factory=list)
    digests: dict[str, Digests] = dataclasses.field(default_factory=dict)

    def take_over(
        self, stored: KnownDatabase, step_name: str, arrays: Mapping[str, AnyArray]
    ) -> None:
        """Adds a database that the new step takes over; ``arrays`` are those in the save."""
        writers = None if stored.processes is None else index_runs.runs_of(stored.processes)
        on_host = any(isinstance(arrays[name], np.ndarray) for name in stored.contents)
        self.entries.append([[*stored.contents], writers, [step_name, stored.name], on_host])
        self.digests |= {name: content.digests for name, content in stored.contents.items()}

    def write(self, names: Sequence[str], arrays: Mapping[str, AnyArray], count: int) -> None:
        """Adds a database that ``count`` processes write; ``arrays`` are those in the save."""
        writers = None
        if count > 1:  # process 0 always writes the metadata of the arrays
            found = (chunking.storing_processes(arrays[name]) for name in names)
            writers = index_runs.runs_of(sorted(frozenset({0}).union(*found)))
        on_host = any(isinstance(arrays[name], np.ndarray) for name in names)
        self.entries.append([[*names], writers, None, on_host])

    def to_json(self) -> Any:
        """Returns what all processes need to know, as JSON."""
        return [self.copy, self.entries]


@dataclasses.dataclass(frozen=True)
class Written:
    """What process 0 knows about the step of a save, once the step is durable.

    Attributes:
      databases: the databases of unchanged arrays: name -> database.
      contents: stored name -> content, for all arrays that later saves may take over.
      files: for each of the databases its files, as in ``KnownDatabase``.
      still: the leaves that count as still from now on; None if these do not change.
      reused_bytes: the bytes of the files that the save took over.
    """

    databases: Mapping[str, Database]
    contents: Mapping[str, Content]
    files: Mapping[str, Sequence[Mapping[str, File]]]
    still: Sequence[str] | None
    reused_bytes: int


def divided(
    decision: Any, arrays: Mapping[str, AnyArray], directory: epath.Path, processes: Processes
) -> Division:
    """Returns the division that process 0 decided.

    The folders of a database that the step takes over are divided among the processes, whichever
    processes wrote them. Process 0 alone stores host arrays, and takes their databases over.

    Args:
      decision: the result of ``Decision.to_json``.
      arrays: stored name -> array, for all arrays of the save; host arrays on process 0 only.
      directory: the directory of the run.
      processes: the processes of the run.

    Raises:
      ProcessError: this process saves other arrays than process 0.
    """
    copy, entries = decision
    found: dict[str, Database] = {}
    folders: dict[str, str] = {}
    linked: set[str] = set()
    links: list[tuple[epath.Path, str]] = []
    index = processes.index if processes.count > 1 else None
    num_folders = 0
    for number, (names, runs, source, on_host) in enumerate(entries):
        writers = None if runs is None else tuple(index_runs.indices_of(runs))
        name = unchanged.name_of(number)
        found[name] = Database(copy, tuple(names), writers)
        if source is not None:
            linked.update(names)
        if on_host and not processes.is_first:
            continue
        if not arrays.keys() >= set(names):
            raise ProcessError(
                f"process {processes.index} saves other arrays than process 0: expected "
                f"{', '.join(sorted(set(names) - arrays.keys()))[:300]}. Pass the same objects to "
                "attach on every process."
            )
        if source is None:
            folders |= dict.fromkeys(names, unchanged.folder_of(name, index))
            continue
        old = unchanged.folders_of(source[1], writers)
        for folder, new in zip(old, unchanged.folders_of(name, writers), strict=True):
            if on_host or num_folders % processes.count == processes.index:
                links.append((directory / source[0] / STATE / folder, new))
            num_folders += not on_host
    return Division(found, folders, frozenset(linked), links)
