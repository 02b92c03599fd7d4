"""Owns which run a directory is of, so that a local tier is never taken for another run's.

A ramdisk outlives the processes of a run, and may outlive the run: its directory may have been
removed, or the next run be given the same path. What is left there must not be resumed from. So a
run that has a local tier is given a name, in the file ``run`` of both of its directories.
"""

from __future__ import annotations

import re
import uuid

from etils import epath

from torchax_ckpt.storage import inspection

NAME = "run"
_RUN = re.compile(r"[0-9a-f]{32}")


def read(directory: epath.Path) -> str | None:
    """Which run a directory is of; None if that was never said."""
    try:
        if not inspection.is_plain(directory, NAME):
            return None
        found = (directory / NAME).read_text()
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return None
    return found if _RUN.fullmatch(found) else None


def are_one(directory: epath.Path, other: epath.Path) -> bool:
    """Whether two directories are of one run."""
    run = read(directory)
    return run is not None and run == read(other)


def give(directory: epath.Path) -> None:
    """Gives the run of a durable directory a name, if it has none. For whoever holds the lease."""
    if read(directory) is None:
        (directory / NAME).write_text(uuid.uuid4().hex)


def copy(durable: epath.Path, local: epath.Path) -> None:
    """Has a local directory be of the same run as a durable one, which was given its name."""
    run = read(durable)
    assert run is not None, "the durable directory is claimed first"
    (local / NAME).write_text(run)
