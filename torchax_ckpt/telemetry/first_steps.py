"""Remembers which step of a run had a file first, for the files that later steps link."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping

from etils import epath

from torchax_ckpt.layout import unchanged
from torchax_ckpt.storage.directory.committed_step import STATE
from torchax_ckpt.storage.medium import location
from torchax_ckpt.stored import shared_files
from torchax_ckpt.stored.shared_files import File

# A save links files of one of the steps just before it, unless the program restored an old step.
_NUM_REMEMBERED = 16


class FirstSteps:
    """Knows for the latest steps of a run which step had each file of unchanged arrays first.

    Only files in databases of unchanged arrays can be links, see ``layout/unchanged.py``.

    Args:
      directory: the directory of the run.
    """

    def __init__(self, directory: epath.Path) -> None:
        self._directory = directory
        self._latest: collections.deque[Mapping[File, int]] = collections.deque(
            maxlen=_NUM_REMEMBERED
        )

    def linked(self, step: int, path: epath.Path) -> dict[int, int]:
        """Returns, for a step that was just committed, the bytes in files that it linked.

        Must be called before any earlier step is deleted: a file that has no other link then is one
        that the save wrote.

        Args:
          step: the step.
          path: its folder.

        Returns:
          The step that had the files first -> their bytes. For files that earlier programs wrote,
          this is the newest other step that has them. If there is none, it is the new step.
        """
        if location.is_bucket(path):
            return {}
        found = (shared_files.files(folder).items() for folder in _databases(path))
        files = dict(itertools.chain.from_iterable(found))
        missing = {file for file, status in files.items() if status.st_nlink > 1}
        first = dict.fromkeys(files, step)
        for known in self._known(step):
            if not missing:
                break
            first |= {file: known[file] for file in missing & known.keys()}
            missing -= known.keys()
        self._latest.append(first)
        linked: collections.Counter[int] = collections.Counter()
        for file, status in files.items():
            if status.st_nlink > 1:
                linked[first[file]] += status.st_size
        return dict(linked)

    def _known(self, step: int) -> Iterator[Mapping[File, int]]:
        """Yields file -> step for the latest steps, and then for the other steps, newest first."""
        yield from reversed(self._latest)
        names = (path.name for path in self._directory.iterdir())
        numbers = sorted((int(name) for name in names if name.isdecimal()), reverse=True)
        for number in numbers:
            if number != step:
                for folder in _databases(self._directory / str(number)):
                    yield dict.fromkeys(shared_files.files(folder), number)


def _databases(step_path: epath.Path) -> Iterator[epath.Path]:
    folder = step_path / STATE
    if folder.is_dir():
        for child in folder.iterdir():
            if unchanged.is_folder(child.name):
                yield child
