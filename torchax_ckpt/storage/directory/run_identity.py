"""The name of a directory's run, which prevents use of a local tier of another run.

A ramdisk outlives the processes of a run and may outlive the run: the run's directory may have been
removed, or the next run may get the same path. No run may resume from such leftovers. A run with a
local tier therefore has a name, in the file ``run`` of both of its directories. In the local
directory the word ``local`` precedes the name. A run deletes steps of other runs only from
directories so marked, never from a directory that a user gave as a local tier by mistake.

A host may also be absent while the run continues without it, and return with steps that the run has
abandoned. Every program that saves therefore gives the run a new name, which an absent host does
not learn. The local directories get the new name first, beside the present one. If the program is
killed at any moment, the durable directory has one of the two names, and every host that took part
knows both. A program that saves without a local tier removes the name.

As with the lease, a program replaces the name by compare-and-swap, because a bucket may carry out a
request long after its answer was lost.
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
    """Returns the names of the run to which a durable directory or local tier belongs, or [].

    A local tier may have two names: the present one and the next.
    """
    try:
        if not containment.is_plain_file(directory / NAME):
            return []
        found = _RUN.fullmatch((directory / NAME).read_text())
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return []
    return found["names"].split() if found and bool(found["local"]) == is_local else []


def is_before(local: epath.Path, durable: epath.Path) -> bool:
    """Returns whether ``local`` is a local tier of the run of the directory ``durable``."""
    return any(run in names(local, is_local=True) for run in names(durable))


def write(directory: epath.Path, runs: Sequence[str], *, is_local: bool) -> None:
    """Writes the name of a directory's run; only for the holder of the lease.

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
    """Removes the name of a durable directory's run: no local tier belongs to it any more."""
    if names(durable):
        with _exchanged(durable) as (record, seen):
            if seen is not None:
                record.remove(seen)


def require_local(directory: epath.Path, steps: Sequence[int]) -> None:
    """Checks that a directory with steps was a local tier before.

    Raises:
      DirectoryError: it has steps and was never a local tier.
    """
    if steps and not names(directory, is_local=True):
        there = ", ".join(map(str, sorted(steps)))
        raise DirectoryError(
            f"{directory}: expected an empty directory or a local tier of some run, found steps "
            f"{there} that no local tier has written. LocalTier(path) deletes the steps of other "
            "runs: give it a directory of its own.",
            path=directory,
        )


@contextlib.contextmanager
def _exchanged(directory: epath.Path) -> Iterator[tuple[AtomicRecord, Seen | None]]:
    """Yields the record of the name, and the record's present content, which may be replaced.

    Raises:
      DirectoryError: this package did not write the present file, or another program replaces it.
    """
    path = directory / NAME
    foreign = DirectoryError(
        f"{path}: expected the name of a run, found something else. A run with a local tier "
        "keeps its name in this file: rename the present one, or give the run another directory.",
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
            f"{path}: another program is replacing the name of the run", path=directory
        ) from None
    finally:
        record.close()
