"""Owns which run a directory is of, so that a local tier is never taken for another run's.

A ramdisk outlives the processes of a run, and may outlive the run: its directory may have been
removed, or the next run be given the same path. What is left there must not be resumed from. So a
run that has a local tier is given a name, in the file ``run`` of both of its directories. In the
local one the word ``local`` stands before it: what other runs have left there is removed, and that
must never be the steps of a directory that was given as a local tier by mistake.

A host may also be absent while the run goes on without it, and come back with steps that the run
has left behind. So every program that saves gives the run a new name, which an absent host does not
hear of. The local directories learn it first, beside the present one, so that a program may be
killed at any moment: whichever of the two the durable directory has then, those that took part know
it. A program that saves without a local tier takes the name away.

As for the lease, a name is only replaced by whoever knows the present one: on a bucket a request
may be carried out long after its answer was lost.
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
    """A name that no run has."""
    return uuid.uuid4().hex


def names(directory: epath.Path, *, is_local: bool = False) -> list[str]:
    """Which run a durable directory, or a local tier, is of, or may be; [] if it is none."""
    try:
        if not containment.is_plain_file(directory / NAME):
            return []
        found = _RUN.fullmatch((directory / NAME).read_text())
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return []
    return found["names"].split() if found and bool(found["local"]) == is_local else []


def is_before(local: epath.Path, durable: epath.Path) -> bool:
    """Whether a directory is a local tier of the run of a durable one."""
    return any(run in names(local, is_local=True) for run in names(durable))


def write(directory: epath.Path, runs: Sequence[str], *, is_local: bool) -> None:
    """Names the run of a directory; for whoever holds the lease.

    Args:
      directory: a durable one, or a local tier.
      runs: the name; of a local tier perhaps the present one and the next.
      is_local: whether it is a local tier.

    Raises:
      DirectoryError: there is a file of that name that this package has not written, or another
        program names the run right now.
    """
    content = (_LOCAL if is_local else "") + " ".join(runs)
    with _exchanged(directory) as (record, seen):
        record.swap(seen, content.encode())


def forget(durable: epath.Path) -> None:
    """From now on no local tier is of the run of a durable directory."""
    if names(durable):
        with _exchanged(durable) as (record, seen):
            if seen is not None:
                record.remove(seen)


def require_local(directory: epath.Path, steps: Sequence[int]) -> None:
    """Refuses to take a directory for a local tier that has steps, and was none before.

    Raises:
      DirectoryError: that is so.
    """
    if steps and not names(directory, is_local=True):
        there = ", ".join(map(str, sorted(steps)))
        raise DirectoryError(
            f"{directory}: expected an empty directory or a local tier of some run, found steps "
            f"{there} that no local tier has written. LocalTier(path) removes "
            "what is not of its run: give it a directory of its own.",
            path=directory,
        )


@contextlib.contextmanager
def _exchanged(directory: epath.Path) -> Iterator[tuple[AtomicRecord, Seen | None]]:
    """The record of the name, and what it is now; in the block it may be replaced."""
    path = directory / NAME
    foreign = DirectoryError(
        f"{path}: expected the name of a run, found something else. A run with a local tier "
        "keeps its name there: rename what is there, or give the run another directory.",
        path=directory,
    )
    if not containment.is_plain_file(path):
        raise foreign
    record = record_at(path)
    try:
        seen = record.read()
        # Empty is what a power cut may leave of it.
        if seen and seen.content and not _RUN.fullmatch(seen.content.decode(errors="replace")):
            raise foreign
        yield record, seen
    except Conflict:
        raise DirectoryError(
            f"{path}: another program names the run at this moment", path=directory
        ) from None
    finally:
        record.close()
