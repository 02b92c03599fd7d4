"""Owns which run a directory is of, so that a local tier is never taken for another run's.

A ramdisk outlives the processes of a run, and may outlive the run: its directory may have been
removed, or the next run be given the same path. What is left there must not be resumed from. So a
run that has a local tier is given a name, in the file ``run`` of both of its directories. In the
local one the word ``local`` stands before it: what other runs have left there is removed, and that
must never be the steps of a directory that was given as a local tier by mistake.

A host may also be absent while the run goes on without it, and come back with steps that the run
has left behind. So every program that saves gives the run a new name, which an absent host does not
hear of. The local directories learn it first, beside the old one: wherever a program is killed, the
durable directory has a name that all those that took part know.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Sequence

from etils import epath

from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.storage import inspection, location, modes
from torchax_ckpt.storage.record import DRAFT_SUFFIX

NAME = "run"
_LOCAL = "local "
_RUN = re.compile(rf"(?P<local>{_LOCAL})?(?P<names>[0-9a-f]{{32}}( [0-9a-f]{{32}})?)")


def is_before(local: epath.Path, durable: epath.Path) -> bool:
    """Whether a directory is a local tier of the run of a durable one."""
    return any(run in _names(local, is_local=True) for run in _names(durable))


def new() -> str:
    """A name that no run has."""
    return uuid.uuid4().hex


def give(durable: epath.Path, name: str) -> None:
    """Gives the run of a durable directory a name. For whoever holds the lease."""
    _write(durable, name)


def forget(durable: epath.Path) -> None:
    """From now on no local tier is of the run of a durable directory."""
    if (durable / NAME).exists():
        (durable / NAME).unlink(missing_ok=True)


def require_local(directory: epath.Path, steps: Sequence[int]) -> None:
    """Refuses to take a directory for a local tier that has steps, and was none before.

    Raises:
      DirectoryError: that is so.
    """
    if steps and not _names(directory, is_local=True):
        there = ", ".join(map(str, sorted(steps)))
        raise DirectoryError(
            f"{directory}: expected an empty directory or a local tier of some run, found steps "
            f"{there} that no local tier has written. LocalTier(path) removes "
            "what is not of its run: give it a directory of its own.",
            path=directory,
        )


def copy(durable: epath.Path, local: epath.Path, name: str | None = None) -> None:
    """Makes a directory a local tier of the run of a durable one.

    Args:
      durable, local: the directories.
      name: which the durable one is about to be given.
    """
    if names := [*_names(durable), *([name] if name else [])]:
        _write(local, _LOCAL + " ".join(names))


def _names(directory: epath.Path, *, is_local: bool = False) -> list[str]:
    """Which run a durable directory, or a local tier, is of; [] if it is none."""
    try:
        if not inspection.is_plain_file(directory / NAME):
            return []
        found = _RUN.fullmatch((directory / NAME).read_text())
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return []
    return found["names"].split() if found and bool(found["local"]) == is_local else []


def _write(directory: epath.Path, content: str) -> None:
    """At once: a process that is killed meanwhile has changed nothing."""
    if location.is_bucket(directory):
        (directory / NAME).write_text(content)
        return
    draft = directory / f"{NAME}-{uuid.uuid4().hex}{DRAFT_SUFFIX}"
    modes.write_file(draft, content.encode())
    os.replace(draft, directory / NAME)
