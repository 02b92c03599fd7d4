"""Owns what makes a directory a committed step: Orbax's commit record, and on a bucket its mark.

The mark comes last, so it can say what was written before: it holds the digests of Orbax's own
metadata that anybody is shown or that anything goes by, which is JSON without a digest.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import json
import logging
import os
import re
from collections.abc import Iterable
from typing import Any

from etils import epath

from torchax_ckpt.storage.directory import verified
from torchax_ckpt.storage.directory.committed_step import (
    LOST,
    MANIFEST,
    STATE,
    SUMMARY,
    CommittedStep,
)
from torchax_ckpt.storage.medium import bucket, containment, fsync, location, seals

logger = logging.getLogger(__name__)

# What Orbax writes last into a step.
MARK = "commit_success.txt"
_RECORD = "_CHECKPOINT_METADATA"
# The shardings that arrays were saved with, for people.
SHARDINGS = f"{STATE}/_sharding"
_SEALED = (_RECORD, SHARDINGS)
# What a step of this package, or one of bare Orbax, consists of.
_PARTS = {STATE, MANIFEST, SUMMARY, verified.MARK, _RECORD, "_METADATA", "pytree"}
_STEP = re.compile(r"(incoming-)?(0|[1-9][0-9]{0,17})(?(1)(?:-\d+)?)")
# In a folder of a bucket in which a step was begun, and removed.
BEGUN = "begun"
# What together only a step of this package has, which locally has its name since its commit.
_OWN_PARTS = {STATE, MANIFEST, SUMMARY}
# Nanoseconds since 1970, until 2262: what dates are computed from.
_MAX_TIME = 2**63 - 1


def is_marked(path: epath.Path) -> bool:
    """Whether a step is complete as far as its mark tells; locally its name tells that."""
    return not location.is_bucket(path) or (path / MARK).exists()


def is_there(committed: CommittedStep) -> bool:
    """Whether a step was not deleted: that begins with its name, on a bucket with its mark."""
    return committed.path.exists() and is_marked(committed.path)


def is_begun(path: epath.Path) -> bool:
    """Whether a folder in a bucket is a step that was not finished, or was not wholly removed.

    Any other folder there may have a number for a name, and is somebody's.
    """
    if not location.is_bucket(path) or is_marked(path) or not path.is_dir():
        return False
    return any(child.name in _PARTS for child in path.iterdir())


class CommitTimes:
    """Reads when steps were committed; warns once of each that looks like a step and is none."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def steps_among(self, children: Iterable[epath.Path], first: int = 0) -> list[CommittedStep]:
        """The folders of a run that are committed steps, of this number or a higher one."""
        named = [(child, m) for child in children if (m := _STEP.fullmatch(child.name))]
        found = [(child, match) for child, match in named if int(match[2]) >= first]
        with concurrent.futures.ThreadPoolExecutor() as pool:  # each is a round trip to a bucket
            times = pool.map(self.read, (child for child, _ in found))
            # Any directory may have a number for a name; only a commit leaves a time.
            return [
                CommittedStep(int(match[2]), child, time, is_incoming=bool(match[1]))
                for (child, match), time in zip(found, times, strict=True)
                if time is not None
            ]

    def read(self, path: epath.Path) -> int | None:
        """When a step was committed, in nanoseconds since 1970; None if it was not, or is none.

        0 of a step that was committed, and whose record of it is damaged: it must not go unsaid
        that it was there.
        """
        for _ in range(2):  # what lay there at first may have been moved or deleted meanwhile
            try:
                return read_time(path)
            except (FileNotFoundError, NotADirectoryError, ValueError):
                if not _was_committed(path):
                    self._warn_once(path)
                    return None
        return LOST

    def _warn_once(self, path: epath.Path) -> None:
        is_doubtful = not location.is_bucket(path) and (
            (path.is_dir() and any(path.iterdir())) or (path.exists() and not path.is_dir())
        )
        if is_doubtful and path.name not in self._warned:
            self._warned.add(path.name)
            logger.warning(
                "%s looks like a step, but its commit record cannot be read: ignoring it", path
            )


def read_time(path: epath.Path) -> int:
    """When a step was committed, in nanoseconds since 1970, as its record says.

    Raises:
      OSError: it cannot be read; ValueError: it is not what was written. Names the file.
    """
    for name in (_RECORD, MARK):
        if not containment.is_plain(path, name):
            raise ValueError(
                f"{path / name}: expected a regular file of at most {seals.MAX_JSON_BYTES} bytes "
                "in a folder, found something else"
            )
    try:
        known = _stored_digests(path)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path / MARK}: was damaged: {error!s:.100}") from error
    if known is None and location.is_bucket(path):
        raise FileNotFoundError(f"{path / MARK}: is not there")
    try:
        record = json.loads(_read_checked(path, _RECORD, known))
        found = record["commit_timestamp_nsecs"]
    except FileNotFoundError as error:  # which a bucket's client names in its own way
        raise FileNotFoundError(f"{path / _RECORD}: is not there") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path / _RECORD}: was damaged: {error!s:.100}") from error
    if type(found) is not int or not LOST < found <= _MAX_TIME:
        raise ValueError(f"{path / _RECORD}: expected a time of commit, found {found!r:.40}")
    return found


def _was_committed(path: epath.Path) -> bool:
    """Whether what is there shows that a commit was made, whatever has become of its record."""
    if location.is_bucket(path):
        # A mark alone is one that was carried out late, of a save that was given up and removed.
        return is_marked(path) and any((path / name).exists() for name in (_RECORD, *_OWN_PARTS))
    try:
        if os.path.islink(path):
            return False
        names = set(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return bool(names & {MARK, _RECORD}) or names >= _OWN_PARTS


def item_names(path: epath.Path) -> set[str]:
    """What a committed step was made of, as its commit record says; some may be lost since."""
    items = json.loads((path / _RECORD).read_text()).get("item_handlers")
    return set(items) if isinstance(items, dict) else set()


def set_time(path: epath.Path, commit_timestamp_nsecs: int) -> None:
    """Says of a step that is not visible yet when it was committed, which Orbax has said before."""
    record = json.loads((path / _RECORD).read_text())
    record["commit_timestamp_nsecs"] = commit_timestamp_nsecs
    (path / _RECORD).write_text(json.dumps(record))
    said, _, _ = (path / MARK).read_text().partition("\n")
    (path / MARK).write_text(sealing(path, said))
    for name in (_RECORD, MARK):
        fsync.sync(path / name)


def sealing(path: epath.Path, said: str) -> str:
    """The text of a step's mark: what Orbax says, and the digests of what it has written."""
    found = {}
    for name in _SEALED:
        with contextlib.suppress(FileNotFoundError):  # there may be no array with a sharding
            found[name] = seals.of_octets((path / name).read_bytes())
    return f"{said}\n{json.dumps(found)}\n"


def read_sealed(path: epath.Path, name: str) -> bytes:
    """A file of Orbax's metadata of a step.

    Raises:
      OSError: it cannot be read; ValueError: it is not what was written.
    """
    return _read_checked(path, name, _stored_digests(path))


def _stored_digests(path: epath.Path) -> dict[str, Any] | None:
    """File -> digest, {} where the mark has none, as that of bare Orbax; None without a mark."""
    try:
        _, _, sealed = (path / MARK).read_text().partition("\n")
    except (FileNotFoundError, NotADirectoryError):
        return None
    found = json.loads(sealed) if sealed else {}
    if not isinstance(found, dict):
        raise ValueError(f"expected digests, found {found!r:.40}")
    return found


def _read_checked(path: epath.Path, name: str, known: dict[str, Any] | None) -> bytes:
    content = (path / name).read_bytes()
    if known and name in known and known[name] != seals.of_octets(content):
        raise ValueError(f"{name} is not what {MARK} says: one of them was damaged")
    return content


def remove_leftover(path: epath.Path) -> None:
    """Removes what it can: Orbax goes on writing the other files of a save that failed.

    In a bucket who began it may only be stalled, and write more of it at any time: an empty object
    remains, so that no program uses the name again.
    """
    if location.is_bucket(path):
        bucket.remove(path)
        if _STEP.fullmatch(path.name):
            (path / BEGUN).write_text("")
        return
    try:
        path.unlink() if os.path.islink(path) else path.rmtree()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise
        logger.info("%s is still being written to: it is removed later", path)
