"""Stores a run's name in its directories, so that no run uses the local tier of another run.

A ramdisk outlives the processes of a run and may outlive the run: the run's directory may have been
removed, or the next run may get the same path. No run may resume from steps that another run left
in a local tier. A run with a local tier therefore has a name, which is in the file ``run`` of its
durable directory and of its local directories. In the file of a local directory, the word ``local``
precedes the name. A run deletes steps of other runs only from directories whose file ``run`` has
this word, never from a directory that a user gave as a local tier by mistake.

A host may also be absent while the run continues without it, and return with steps that the run has
abandoned. Every program that saves therefore gives the run a new name, which an absent host does
not learn. The local directories get the new name before the durable directory does, and keep the
present name beside the new name. If the program is killed at any moment, each local directory
therefore still has the name that is in the durable directory. A program that saves without a local
tier removes the run's name from the durable directory, so that no run uses the old local tiers.

A program replaces the name by compare-and-swap (``compare_and_swap.py``), because a bucket's server
may carry out a request long after the program has stopped waiting for the answer.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator, Sequence

from etils import epath

from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.storage.directory.compare_and_swap import AtomicRecord, Conflict, Seen, record_at
from torchax_ckpt.storage.medium import containment

NAME = "run"
_LOCAL = "local "
_RUN = re.compile(rf"(?P<local>{_LOCAL})?(?P<names>[0-9a-f]{{32}}( [0-9a-f]{{32}})?)")


def new() -> str:
    """Returns a new, unique name."""
    return uuid.uuid4().hex


def names(directory: epath.Path, *, is_local: bool = False) -> list[str]:
    """Returns the run's names in the file ``run`` of a directory; [] if no valid name is there.

    A local tier may have two names: the run's present name and its next name.
    """
    try:
        if not containment.is_plain_file(directory / NAME):
            return []
        found = _RUN.fullmatch((directory / NAME).read_text())
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return []
    return found["names"].split() if found and bool(found["local"]) == is_local else []


def is_before(local: epath.Path, durable: epath.Path) -> bool:
    """Returns whether ``local`` is a local tier of the run in the durable directory ``durable``."""
    return any(run in names(local, is_local=True) for run in names(durable))


def write(directory: epath.Path, runs: Sequence[str], *, is_local: bool) -> None:
    """Writes a run's name into a directory; only the holder of the lease may call this function.

    Args:
      directory: a durable directory or a local tier.
      runs: the name; for a local tier perhaps the present name and the next one.
      is_local: whether the directory is a local tier.

    Raises:
      DirectoryError: this package did not write the present file ``run``, or another program
        replaces the name at the same time.
    """
    content = (_LOCAL if is_local else "") + " ".join(runs)
    with _exchanged(directory) as (record, seen):
        record.swap(seen, content.encode())


def forget(durable: epath.Path) -> None:
    """Removes a run's name from its durable directory, so that no local tier belongs to the run."""
    if names(durable):
        with _exchanged(durable) as (record, seen):
            if seen is not None:
                record.remove(seen)


def require_local(directory: epath.Path, steps: Sequence[int]) -> None:
    """Refuses a directory as local tier if it has steps but was never a local tier.

    Raises:
      DirectoryError: the directory has steps and was never a local tier.
    """
    if steps and not names(directory, is_local=True):
        there = ", ".join(map(str, sorted(steps)))
        raise DirectoryError(
            f"{directory}: expected an empty directory or the local tier of a run, found steps "
            f"{there} that were not saved to a local tier. LocalTier(path) would delete these "
            "steps: give LocalTier a directory of its own.",
            path=directory,
        )


@contextlib.contextmanager
def _exchanged(directory: epath.Path) -> Iterator[tuple[AtomicRecord, Seen | None]]:
    """Yields the record of a directory's file ``run``, and the content that the file has now.

    Raises:
      DirectoryError: this package did not write the present file, or another program replaces it.
    """
    path = directory / NAME
    foreign = DirectoryError(
        f"{path}: expected the name of a run, found something else. A run with a local tier "
        "keeps its name in this file: rename the file, or give the run another directory.",
        path=directory,
    )
    if not containment.is_plain_file(path):
        raise foreign
    record = record_at(path)
    try:
        seen = record.read()
        # A power cut may leave an empty file.
        if seen and seen.content and not _RUN.fullmatch(seen.content.decode(errors="replace")):
            raise foreign
        yield record, seen
    except Conflict:
        raise DirectoryError(
            f"{path}: another program has just replaced the run's name in this file. Let only one "
            "program save to the directory.",
            path=directory,
        ) from None
    finally:
        record.close()
