"""Finds the files that several steps of a run share, and counts the bytes of the steps.

On a disk, a step may have hard links to files of earlier steps (``layout/unchanged.py``).
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable, Mapping, Sequence

from etils import epath

from torchax_ckpt.errors import CheckpointError
from torchax_ckpt.layout import unchanged
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.medium import medium
from torchax_ckpt.storage.medium.stored_file import StoredFile

# The device and the inode number of a file, which are equal for links to one file.
File = tuple[int, int]


def linked_files(folder: epath.Path) -> dict[str, File]:
    """Returns the files below a folder that have other links, anywhere: name below it -> file."""
    files = medium.of(folder).files(folder)
    return {f.name: f.identity for f in files if f.identity is not None and f.num_links > 1}


class Usage:
    """The bytes that some steps of a run take on storage; each step's files are listed once."""

    def __init__(self, steps: Iterable[CommittedStep] = ()) -> None:
        self._num_bytes: dict[Key, int] = {}
        self._linked: dict[Key, Mapping[File, StoredFile]] = {}
        self._num_steps: collections.Counter[File] = collections.Counter()
        self.update(steps)

    def update(self, steps: Iterable[CommittedStep]) -> None:
        """Counts these steps in place of those before; lists the files of new steps only."""
        wanted = {committed.key: committed for committed in steps}
        for key in wanted.keys() - self._num_bytes.keys():
            num_bytes, linked = _listed(wanted[key])
            self._num_bytes[key], self._linked[key] = num_bytes, linked
            self._num_steps.update(linked.keys())
        for key in self._num_bytes.keys() - wanted.keys():
            del self._num_bytes[key]
            self._num_steps.subtract(self._linked.pop(key).keys())
        self._num_steps += collections.Counter()  # drops those that are zero

    def num_bytes(self, committed: CommittedStep) -> int:
        """Returns the bytes of all files of a step; 0 if it was deleted before it was listed."""
        return self._num_bytes[committed.key]

    def shared_bytes(self, committed: CommittedStep) -> int:
        """Returns the bytes of the files of a step that another of the steps has too."""
        linked = self._linked[committed.key]
        return sum(f.num_bytes for key, f in linked.items() if self._num_steps[key] > 1)

    @property
    def total_bytes(self) -> int:
        """The bytes of all steps; a file that several steps have counts once."""
        sizes = {k: f.num_bytes for linked in self._linked.values() for k, f in linked.items()}
        again = sum((self._num_steps[file] - 1) * size for file, size in sizes.items())
        return sum(self._num_bytes.values()) - again

    def freed_bytes(self, doomed: Iterable[CommittedStep]) -> int:
        """Returns the bytes that are freed if some of the steps are deleted."""
        freed, links = 0, collections.Counter[File]()
        for committed in doomed:
            linked = self._linked[committed.key]
            freed += self._num_bytes[committed.key] - sum(f.num_bytes for f in linked.values())
            links.update(linked.keys())
            freed += sum(f.num_bytes for key, f in linked.items() if links[key] == f.num_links)
        return freed


def _listed(committed: CommittedStep) -> tuple[int, dict[File, StoredFile]]:
    """Returns the bytes of a step, and those of its files that have links or may get some."""
    settled = committed.path.parent / str(committed.step)  # where incoming-* moves meanwhile
    places = (committed.path, settled) if committed.path != settled else (settled,)
    files = next(filter(None, (medium.of(p).files(p) for p in places)), [])
    linked = {
        file.identity: file
        for file in files
        if file.identity and (file.num_links > 1 or unchanged.FOLDER_PREFIX in file.name)
    }
    return sum(file.num_bytes for file in files), linked


def damaged_too(
    error: CheckpointError, damaged: CommittedStep, steps: Iterable[CommittedStep]
) -> list[CommittedStep]:
    """Returns the other steps that share the damaged file, if the error knows which file it is."""
    name = os.path.relpath(error.file, damaged.path) if error.file else ""
    file = linked_files(damaged.path).get(name)
    if file is None:
        return []
    others = (committed for committed in steps if committed.path != damaged.path)
    return [s for s in others if file in linked_files(s.path).values()]


def naming(message: str, sharing: Sequence[CommittedStep]) -> str:
    """Returns the message, and a sentence that names the steps ``damaged_too`` returned."""
    if not sharing:
        return message
    which = ", ".join(str(committed.step) for committed in sharing)
    return f"{message.rstrip('.')}. Steps that share the damaged file are damaged too: {which}."
