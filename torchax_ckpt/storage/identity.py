"""Owns which run a directory is of, so that a local tier is never taken for another run's.

A ramdisk outlives the processes of a run, and may outlive the run: its directory may have been
removed, or the next run be given the same path. What is left there must not be resumed from. So a
run that has a local tier is given a name, in the file ``run`` of both of its directories. In the
local one the word ``local`` stands before it: what other runs have left there is removed, and that
must never be the steps of a directory that was given as a local tier by mistake.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence

from etils import epath

from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.storage import inspection

NAME = "run"
_LOCAL = "local "
_RUN = re.compile(rf"(?P<local>{_LOCAL})?(?P<name>[0-9a-f]{{32}})")


def is_before(local: epath.Path, durable: epath.Path) -> bool:
    """Whether a directory is a local tier of the run of a durable one."""
    run = _name(durable)
    return run is not None and run == _name(local, is_local=True)


def give(durable: epath.Path) -> None:
    """Gives the run of a durable directory a name, if it has none. For whoever holds the lease."""
    if _name(durable) is None:
        (durable / NAME).write_text(uuid.uuid4().hex)


def require_local(directory: epath.Path, steps: Sequence[int]) -> None:
    """Refuses to take a directory for a local tier that has steps, and was none before.

    Raises:
      DirectoryError: that is so.
    """
    if steps and _name(directory, is_local=True) is None:
        there = ", ".join(map(str, sorted(steps)))
        raise DirectoryError(
            f"{directory}: expected an empty directory or a local tier of some run, found steps "
            f"{there} that no local tier has written. LocalTier(path) removes "
            "what is not of its run: give it a directory of its own.",
            path=directory,
        )


def copy(durable: epath.Path, local: epath.Path) -> None:
    """Makes a directory a local tier of the run of a durable one, which was given its name."""
    run = _name(durable)
    assert run is not None, "the durable directory is claimed first"
    (local / NAME).write_text(_LOCAL + run)


def _name(directory: epath.Path, *, is_local: bool = False) -> str | None:
    """Which run a durable directory, or a local tier, is of; None if it is none."""
    try:
        if not inspection.is_plain_file(directory / NAME):
            return None
        found = _RUN.fullmatch((directory / NAME).read_text())
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return None
    return found["name"] if found and bool(found["local"]) == is_local else None
