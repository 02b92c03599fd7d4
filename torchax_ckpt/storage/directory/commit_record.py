"""Handles Orbax's commit record and commit mark, the files that make a folder a committed step.

The commit mark is written last. Its second line has the digests of two other files: the commit
record, and the file of the arrays' shardings. On a bucket, a folder is a committed step only if it
has a commit mark.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import socket
from collections.abc import Iterable
from typing import Any

from etils import epath

from torchax_ckpt.runtime.background import Executor
from torchax_ckpt.storage.directory.committed_step import (
    ASSETS,
    LOST,
    MANIFEST,
    MAX_STEP,
    STATE,
    SUMMARY,
    VERIFIED,
    CommittedStep,
)
from torchax_ckpt.storage.medium import medium, seals
from torchax_ckpt.storage.medium.stored_file import MARK, RECORD

logger = logging.getLogger(__name__)

# The shardings that the arrays were saved with, for people to read.
SHARDINGS = f"{STATE}/_sharding"
_SEALED = (RECORD, SHARDINGS)
# The names of entries in a step, whether this package or Orbax alone wrote the step.
PARTS = {STATE, MANIFEST, SUMMARY, ASSETS, VERIFIED, RECORD, "_METADATA", "pytree"}
STEP = re.compile(r"(incoming-)?(0|[1-9][0-9]{0,18})(?(1)(?:-\d+)?)")
_ASIDE = re.compile(r"(abandoned-)(0|[1-9][0-9]{0,18})(?:-\d+)?")
# Only steps of this package have all three items. A local step gets its name only at its commit, so
# a folder with such a name and these items was committed.
_OWN_PARTS = {STATE, MANIFEST, SUMMARY}
# The latest commit time that can be computed with, in nanoseconds since 1970: the year 2262.
_MAX_TIME = 2**63 - 1


def is_marked(path: epath.Path) -> bool:
    """Returns whether a step is complete: it has a mark, or a name that only complete steps get."""
    return medium.of(path).is_complete(path)


def is_step(folder: epath.Path) -> bool:
    """Returns whether a local folder is a step, by files that only steps have, not by its name."""
    file_sets = ((MARK,), (RECORD,), [f"{item}/data.json" for item in (MANIFEST, SUMMARY)])
    return any(all((folder / name).exists() for name in names) for names in file_sets)


def is_there(committed: CommittedStep) -> bool:
    """Returns whether a step still exists: whether its deletion has not begun."""
    return committed.path.exists() and is_marked(committed.path)


def steps_among(
    children: Iterable[epath.Path],
    first: int = 0,
    *,
    pattern: re.Pattern[str] = STEP,
    is_local: bool = False,
) -> list[CommittedStep]:
    """Returns the committed steps among a run's folders, from step number ``first`` on.

    In a local tier (``is_local``), a record that cannot be read now counts as damaged.
    """
    named = [(child, m) for child in children if (m := pattern.fullmatch(child.name))]
    numbered = [(child, match) for child, match in named if first <= int(match[2]) <= MAX_STEP]
    # In parallel, because each read is a round trip to a bucket.
    with Executor() as pool:
        time = _time_in_local_tier if is_local else time_or_none
        times = pool.map(time, (child for child, _ in numbered))
        # A directory of another origin may be named by a number, too; only a step has a time.
        return [
            CommittedStep(int(match[2]), child, at, is_incoming=match[1] == "incoming-")
            for (child, match), at in zip(numbered, times, strict=True)
            if at is not None
        ]


def aside_among(children: Iterable[epath.Path]) -> list[CommittedStep]:
    """Returns the steps among a run's folders that were set aside; other folders are skipped."""
    aside = [c for c in children if _ASIDE.fullmatch(c.name) and _was_committed(c)]
    return steps_among(aside, pattern=_ASIDE)


def newest_in(folder: epath.Path) -> int | None:
    """Returns the number of the newest step in a folder; None if it is no run with steps."""
    try:
        named = [(child, m) for child in folder.iterdir() if (m := STEP.fullmatch(child.name))]
    except (FileNotFoundError, NotADirectoryError):
        return None
    newest_first = sorted(named, key=lambda each: int(each[1][2]), reverse=True)
    return next((int(match[2]) for child, match in newest_first if _was_committed(child)), None)


def time_or_none(path: epath.Path) -> int | None:
    """Returns a step's commit time; LOST for a damaged record; None if not committed."""
    for _ in range(2):  # between the calls the step may have been moved or deleted
        try:
            return read_time(path)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            if not _was_committed(path):
                if medium.of(path).is_puzzling(path):
                    _warn_once(path, "its commit record cannot be read: ignoring it")
                return None
    return LOST


def _time_in_local_tier(path: epath.Path) -> int | None:
    try:
        return time_or_none(path)
    except OSError as error:
        _warn_once(path, f"host {socket.gethostname()} cannot read its commit record: {error}")
        return LOST


@functools.cache
def _warn_once(path: epath.Path, problem: str) -> None:
    if os.path.islink(path):
        logger.warning(
            "%s looks like a step, but is a symbolic link to %s: ignoring it, because the files of "
            "a step must lie in its run. Replace the link by a copy of the folder (cp -a)",
            path,
            os.path.realpath(path),
        )
        return
    logger.warning("%s looks like a step, but %s", path, problem)


def read_time(path: epath.Path) -> int:
    """Returns the commit time in a step's record; OSError or ValueError if it cannot be read."""
    for name in (RECORD, MARK):
        if not medium.of(path).is_plain(path / name, with_folder=True):
            raise ValueError(
                f"{path / name}: expected a regular file of at most {seals.MAX_JSON_BYTES} bytes "
                "in a folder that is not a symbolic link, found another kind of file, a larger "
                "file, or a symbolic link as the file or as its folder"
            )
    try:
        known = _stored_digests(path)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path / MARK}: was damaged: {error!s:.100}") from error
    if known is None and not is_marked(path):
        raise FileNotFoundError(f"{path / MARK}: does not exist")
    try:
        record = json.loads(_read_checked(path, RECORD, known))
        found = record["commit_timestamp_nsecs"]
    except FileNotFoundError as error:  # a bucket's client raises it with a text of its own
        raise FileNotFoundError(f"{path / RECORD}: does not exist") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path / RECORD}: was damaged: {error!s:.100}") from error
    if type(found) is not int or not LOST < found <= _MAX_TIME:
        raise ValueError(
            f"{path / RECORD}: expected the time of the step's commit, in nanoseconds since 1970, "
            f"found {found!r:.40}: the file is damaged"
        )
    return found


def _was_committed(path: epath.Path) -> bool:
    """Returns whether a folder's files show that it was committed, even if its record is lost."""
    return medium.of(path).was_committed(path, _OWN_PARTS)


def item_names(path: epath.Path) -> set[str]:
    """Returns the names of the items, such as its manifest, that a step had at its commit."""
    items = json.loads((path / RECORD).read_text(encoding="utf-8")).get("item_handlers")
    return set(items) if isinstance(items, dict) else set()


def sealing(path: epath.Path, said: str) -> str:
    """Returns the text of a step's commit mark: a line, then the digests of two metadata files."""
    digests = {}
    for name in _SEALED:
        with contextlib.suppress(FileNotFoundError):  # no sharded array: no file of shardings
            digests[name] = seals.of_octets(medium.of(path).read(path / name))
    return f"{said}\n{json.dumps(digests)}\n"


def read_sealed(path: epath.Path, name: str) -> bytes:
    """Returns the content of an Orbax metadata file; ValueError unless it has the mark's digest."""
    return _read_checked(path, name, _stored_digests(path))


def _stored_digests(path: epath.Path) -> dict[str, Any] | None:
    """Returns the digests in a commit mark, {} if Orbax alone wrote it; None without a mark."""
    try:
        _, _, sealed = (path / MARK).read_text(encoding="utf-8").partition("\n")
    except (FileNotFoundError, NotADirectoryError):
        return None
    digests = json.loads(sealed) if sealed else {}
    if not isinstance(digests, dict):
        raise ValueError(f"expected digests, found {digests!r:.40}")
    return digests


def _read_checked(path: epath.Path, name: str, known: dict[str, Any] | None) -> bytes:
    content = (path / name).read_bytes()
    if known and name in known and known[name] != seals.of_octets(content):
        raise ValueError(f"{name} does not match its digest in {MARK}: {name} or {MARK} is damaged")
    return content
