"""The folders that were published from a run, on disk.

    OUT/step-1000/              a published folder, which never changes; step-1000-2 if another
                                step 1000 was published before, on a branch that the run left
    OUT/latest                  a text file with the name of the folder that was published last
    OUT/.publishing/record.json the run, the format, the published folders, in order, and since when
                                each is replaced
    OUT/.publishing/lock        locked by the one program that publishes here
    OUT/.publishing/writing-... a folder that is being written
    OUT/.publishing/deleting-...  a folder that is being deleted

A folder is written under ``.publishing``, synced to the disk, and renamed into OUT, whole or not at
all. Only then ``latest`` is replaced, by another rename. A folder is deleted in the reverse order.

A folder gets its entry in the record before its name. An entry without a folder, of a publication
that was killed or a folder that somebody removed, is dropped. Other folders are never touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from torchax_ckpt.errors import CheckpointError, DirectoryError, LeaseError
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.medium import fsync, permissions, seals

logger = logging.getLogger(__name__)

LATEST = "latest"
CONTROL = ".publishing"
_RECORD, _LOCK = "record.json", "lock"
_DRAFTS, _DRAFT_SUFFIX = ("writing-", "deleting-"), ".draft"
_MAX_RECORD_BYTES = 1 << 26
_LOCKED = (errno.EWOULDBLOCK, errno.EACCES)
_now_secs = time.time


@dataclasses.dataclass(frozen=True)
class Published:
    """A published folder; the commit time tells its step from others of the same number."""

    path: Path
    step: int
    commit_timestamp_nsecs: int
    metrics: dict[str, Any]
    replaced_secs: float | None = None  # the time since which it is not among those to keep

    def to_json(self) -> dict[str, Any]:
        """Returns the folder's entry in the record."""
        fields = dataclasses.asdict(self)
        del fields["path"]
        return {"folder": self.path.name, **fields}

    @classmethod
    def from_json(cls, out: Path, entry: dict[str, Any]) -> Published:
        """Returns the folder of an entry; raises ValueError or KeyError if it is malformed."""
        name, step, replaced = entry["folder"], entry["step"], entry["replaced_secs"]
        committed, metrics = entry["commit_timestamp_nsecs"], entry["metrics"]
        if not (isinstance(name, str) and name.startswith("step-") and Path(name).name == name):
            raise ValueError(f"expected the name of a folder, found {name!r:.80}")
        kinds = [type(step), type(committed), type(metrics)]
        if kinds != [int, int, dict] or not isinstance(replaced, int | float | None):
            raise ValueError(f"malformed entry of {name!r:.80}")
        return cls(out / name, step, committed, metrics, replaced)


class PublishedFolders:
    """The folders in OUT, in the order of their publication, all of one run and one format."""

    def __init__(self, out: Path, run: str, format: str) -> None:
        self.path = out
        self._source = {"run": run, "format": format}
        self.published: Sequence[Published] = ()
        self._control = out / CONTROL
        self._lock: int | None = None

    def open(self) -> None:
        """Locks OUT, reads the record, and removes what a killed program left; once only."""
        if self._lock is not None:
            return
        try:
            with self._translated("publish in"):
                self._require_ours()
                permissions.make_folder(epath.Path(self._control))
                self._lock = self._locked()
                self._require_ours()  # others may have written there before this had the lock
                published = tuple(self._recorded())
                for path in self._control.iterdir():
                    if path.name.startswith(_DRAFTS) or path.name.endswith(_DRAFT_SUFFIX):
                        _remove(path)
                self.published = published
                self._point_to_newest()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unlocks OUT, so that another program may publish there."""
        if self._lock is not None:
            # Closing is not enough if a forked child, such as a loader's worker, has the file open.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    @contextlib.contextmanager
    def writing(self, committed: CommittedStep, metrics: dict[str, Any]) -> Iterator[Path]:
        """Publishes the folder that the block writes to the yielded path, unless it raises."""
        step = committed.step
        draft = self._control / f"writing-step-{step}"
        _remove(draft)  # if that has failed before
        try:
            yield draft
            with self._translated("publish in"):
                fsync.sync_tree(epath.Path(draft))
                commit_nsecs = committed.commit_timestamp_nsecs
                new = Published(self._new_path(step), step, commit_nsecs, metrics)
                self._record((*self.published, new))
                draft.rename(new.path)
                self.published = (*self.published, new)
                # Before latest names the folder, its name must survive a loss of power.
                self._sync_names()
                self._point_to_newest()
        finally:
            _remove(draft)

    def retire(self, keep: int, grace_secs: float) -> None:
        """Deletes folders that ceased to be among the newest ``keep`` ones ``grace_secs`` ago."""
        now = _now_secs()
        newest = self.published[-keep:]
        doomed: list[Published] = []
        left: list[Published] = []
        for folder in self.published:
            since = None
            if folder not in newest:
                # A clock that was set back must not let a folder live for years.
                since = min(now, now if folder.replaced_secs is None else folder.replaced_secs)
            is_doomed = since is not None and now - since >= grace_secs
            (doomed if is_doomed else left).append(dataclasses.replace(folder, replaced_secs=since))
        with self._translated("delete folders from"):
            self._point_to_newest()
            for folder in doomed:
                if folder.path.exists():
                    deleting = self._control / f"deleting-{folder.path.name}"
                    _remove(deleting)
                    folder.path.rename(deleting)
                    # Else a loss of power could leave the folder's name with a part of its files.
                    self._sync_names()
                    _remove(deleting)
            if left != [*self.published]:
                self._record(left)
                self.published = left

    def _require_ours(self) -> None:
        """Raises if OUT has entries but no record: ``latest``, for one, is a common name."""
        if self._control.is_symlink():
            raise DirectoryError(
                f"{self._control}: expected a folder, found a link. Remove the link, or give "
                "another folder",
                path=self.path,
            )
        if self.path.exists() and not (self._control / _RECORD).exists():
            others = sorted({path.name for path in self.path.iterdir()} - {CONTROL})
            if others:
                raise DirectoryError(
                    f"{self.path}: expected a new or empty folder, or one that was published to "
                    f"before, found {others[0]!r:.80} and no {CONTROL}/{_RECORD}. Give another "
                    "folder",
                    path=self.path,
                )

    def _locked(self) -> int:
        # The lock ends with the process, however it ends.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self._control / _LOCK, flags, 0o664)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
        except OSError as error:
            found = os.pread(lock, 200, 0).decode(errors="replace")
            os.close(lock)
            if error.errno not in _LOCKED:
                raise
            raise LeaseError(
                f"{self.path}: another program publishes here: {found or 'an unknown process'}. "
                "End it, or give another folder",
                path=self.path,
            ) from None
        return lock

    def _recorded(self) -> list[Published]:
        path = self._control / _RECORD
        try:
            with open(path, "rb") as file:
                content = file.read(_MAX_RECORD_BYTES)
        except FileNotFoundError:
            return []
        try:
            record = seals.unseal(json.loads(content))
            source = {key: record[key] for key in self._source}
            found = [Published.from_json(self.path, entry) for entry in record["published"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DirectoryError(
                f"{path}: is damaged: {error!s:.200}. Publish to another folder",
                path=path,
            ) from error
        found = [folder for folder in found if folder.path.is_dir()]
        if found and source != self._source:
            there, here = (
                f"{s['run']!s:.300} in the format {s['format']!s:.20}"
                for s in (source, self._source)
            )
            raise DirectoryError(
                f"{self.path}: has folders of the run {there}, found the run {here}. Give another "
                f"folder, also if the run was moved; or first delete {found[0].path.name} and all "
                "other folders here",
                path=self.path,
            )
        return found

    def _record(self, published: Sequence[Published]) -> None:
        entries = [folder.to_json() for folder in published]
        self._write(self._control / _RECORD, seals.encoded({**self._source, "published": entries}))

    def _point_to_newest(self) -> None:
        path = self.path / LATEST
        if not self.published:
            path.unlink(missing_ok=True)
            return
        content = f"{self.published[-1].path.name}\n".encode()
        with contextlib.suppress(FileNotFoundError):
            if path.read_bytes() == content:
                return
        self._write(path, content)

    def _write(self, path: Path, content: bytes) -> None:
        """Replaces a small file: readers, and a loss of power, find the old content or the new."""
        draft = self._control / f"{path.name}{_DRAFT_SUFFIX}"
        draft.unlink(missing_ok=True)
        permissions.write_file(draft, content)
        fsync.swap_in(draft, path)

    def _new_path(self, step: int) -> Path:
        name = f"step-{step}"
        names = itertools.chain((name,), (f"{name}-{count}" for count in itertools.count(2)))
        used_names = {folder.path.name for folder in self.published}
        return next(p for n in names if n not in used_names and not (p := self.path / n).exists())

    def _sync_names(self) -> None:
        fsync.sync(self.path)
        fsync.sync(self._control)

    @contextlib.contextmanager
    def _translated(self, action: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            text = f"cannot {action} {self.path}: {error}"
            raise DirectoryError(text, path=self.path) from error


def _remove(path: Path) -> None:
    """Removes a file or folder that nothing names any more; a failure is only logged."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)
