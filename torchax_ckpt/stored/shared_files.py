"""Finds the files that several steps of a run share, and counts the bytes of the steps.

A step may have hard links to files of earlier steps (``layout/unchanged.py``); not in a bucket.
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence

from etils import epath

from torchax_ckpt.errors import CheckpointError
from torchax_ckpt.layout import unchanged
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.medium import containment, location

# The device and the inode number of a file, which are equal for links to one file.
File = tuple[int, int]


def linked_files(folder: epath.Path) -> dict[str, os.stat_result]:
    """Returns path and status of the files below a folder that have other links, anywhere."""
    return {path: status for path, status in _walk(folder).items() if status.st_nlink > 1}


def _walk(folder: epath.Path) -> dict[str, os.stat_result]:
    """Returns path and status of the files below a local folder; {} on a bucket."""
    if not location.is_bucket(folder):
        with contextlib.suppress(FileNotFoundError):  # another program deletes the folder
            return dict(containment.walk(folder))
    return {}


def file_of(status: os.stat_result) -> File:
    """Returns what identifies a file, whatever its path."""
    return status.st_dev, status.st_ino


class Usage:
    """The bytes that some steps of a run take on storage; each step's files are listed once."""

    def __init__(self, steps: Iterable[CommittedStep] = ()) -> None:
        self._num_bytes: dict[Key, int] = {}
        self._linked: dict[Key, Mapping[File, os.stat_result]] = {}
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
        return sum(status.st_size for f, status in linked.items() if self._num_steps[f] > 1)

    @property
    def total_bytes(self) -> int:
        """The bytes of all steps; a file that several steps have counts once."""
        sizes = {f: s.st_size for linked in self._linked.values() for f, s in linked.items()}
        again = sum((self._num_steps[file] - 1) * size for file, size in sizes.items())
        return sum(self._num_bytes.values()) - again

    def freed_bytes(self, doomed: Iterable[CommittedStep]) -> int:
        """Returns the bytes that are freed if some of the steps are deleted."""
        freed, links = 0, collections.Counter[File]()
        for committed in doomed:
            linked = self._linked[committed.key]
            freed += self._num_bytes[committed.key] - sum(s.st_size for s in linked.values())
            links.update(linked.keys())
            freed += sum(s.st_size for f, s in linked.items() if links[f] == s.st_nlink)
        return freed


def _listed(committed: CommittedStep) -> tuple[int, dict[File, os.stat_result]]:
    """Returns the bytes of a step, and those of its files that are links or may become links."""
    if location.is_bucket(committed.path):
        return containment.stored_bytes(committed.path), {}
    settled = committed.path.parent / str(committed.step)  # where incoming-* moves meanwhile
    found = _walk(committed.path) or _walk(settled)
    linked = {
        file_of(status): status
        for path, status in found.items()
        if status.st_nlink > 1 or unchanged.FOLDER_PREFIX in path
    }
    return sum(status.st_size for status in found.values()), linked


def damaged_too(
    error: CheckpointError, damaged: CommittedStep, steps: Iterable[CommittedStep]
) -> list[CommittedStep]:
    """Returns the other steps that share the damaged file, if the error knows which file it is."""
    status = linked_files(damaged.path).get(error.file or "")
    if status is None:
        return []
    others = (committed for committed in steps if committed.path != damaged.path)
    file = file_of(status)
    return [s for s in others if file in map(file_of, linked_files(s.path).values())]


def naming(message: str, sharing: Sequence[CommittedStep]) -> str:
    """Returns the message, and a sentence that names the steps ``damaged_too`` returned."""
    if not sharing:
        return message
    which = ", ".join(str(committed.step) for committed in sharing)
    return f"{message.rstrip('.')}. Steps that share the damaged file are damaged too: {which}."
