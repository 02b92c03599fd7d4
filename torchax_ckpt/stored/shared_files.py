"""Finds the files that several steps of a run share, and counts the bytes of the steps.

A step may have hard links to files of earlier steps, see ``layout/unchanged.py``. A bucket has no
links, so there each object belongs to one step.
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence

from etils import epath

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


def files(folder: epath.Path) -> dict[File, os.stat_result]:
    """Returns the files below a local folder, and their status."""
    return {file_of(status): status for status in _walk(folder).values()}


def file_of(status: os.stat_result) -> File:
    """Returns what identifies a file, whatever its path."""
    return status.st_dev, status.st_ino


class Usage:
    """The bytes that some steps of a run take on storage; their files are listed once, at first."""

    def __init__(self, steps: Iterable[CommittedStep]) -> None:
        self._num_bytes: dict[epath.Path, int] = {}
        self._linked: dict[epath.Path, Mapping[File, os.stat_result]] = {}
        self._num_steps: collections.Counter[File] = collections.Counter()
        for committed in steps:
            path = committed.path
            found = _walk(path).values()
            is_bucket = location.is_bucket(path)
            self._num_bytes[path] = (
                containment.stored_bytes(path) if is_bucket else sum(s.st_size for s in found)
            )
            self._linked[path] = {file_of(s): s for s in found if s.st_nlink > 1}
            self._num_steps.update(self._linked[path].keys())

    def num_bytes(self, committed: CommittedStep) -> int:
        """Returns the bytes of all files of a step."""
        return self._num_bytes[committed.path]

    def shared_bytes(self, committed: CommittedStep) -> int:
        """Returns the bytes of the files of a step that another of the steps has too."""
        linked = self._linked[committed.path]
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
            linked = self._linked[committed.path]
            freed += self._num_bytes[committed.path] - sum(s.st_size for s in linked.values())
            links.update(linked.keys())
            freed += sum(s.st_size for f, s in linked.items() if links[f] == s.st_nlink)
        return freed


def damaged_too(
    message: str, damaged: CommittedStep, steps: Iterable[CommittedStep]
) -> list[CommittedStep]:
    """Returns the steps that share the damaged file, which ``message`` names if it is known."""
    named = {file_of(s) for path, s in linked_files(damaged.path).items() if path in message}
    if not named:
        return []
    others = (committed for committed in steps if committed.path != damaged.path)
    return [s for s in others if not named.isdisjoint(map(file_of, linked_files(s.path).values()))]


def naming(message: str, sharing: Sequence[CommittedStep]) -> str:
    """Returns the message, and a sentence that names the steps ``damaged_too`` returned."""
    if not sharing:
        return message
    which = ", ".join(str(committed.step) for committed in sharing)
    return f"{message.rstrip('.')}. Steps that share the damaged file are damaged too: {which}."
