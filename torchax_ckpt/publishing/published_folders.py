"""The folders that were published from a run, on a disk or in a bucket.

    OUT/step-1000/              a published folder, which never changes; step-1000-2 if another
                                step 1000 was published before, on a branch that the run left;
                                in a bucket of S3 always with a number, so that no name recurs
    OUT/latest                  a text file with the name of the folder that was published last
    OUT/.publishing/record.json the run, the format, the published folders, in order, and since when
                                each is replaced; the folders that are unfinished
    OUT/.publishing/lease       the lease of the one program that publishes here
    OUT/.publishing/writing-... a folder that is being written
    OUT/.publishing/deleting-...  a folder that is being deleted

A folder is unfinished in the record from before it appears in OUT until it gets its entry; then
``latest`` is replaced. It is unfinished again before it is deleted. What a killed program left
unfinished, the next one deletes. An entry without a folder, which somebody removed, is dropped.

On a disk, a folder is written under ``.publishing``, synced, and renamed into OUT, whole or not at
all, and it is renamed back before its files are deleted. In a bucket, objects appear one by one.

A file that the folder published before has too, with the same bytes, is a hard link to it, or is
copied within the bucket. No file is ever changed in place. Other folders are never touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from torchax_ckpt.errors import DirectoryError, LeaseError
from torchax_ckpt.publishing import digests
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.lease import Lease
from torchax_ckpt.storage.medium import medium, permissions, seals, storage_errors
from torchax_ckpt.storage.medium.compare_and_swap import Conflict
from torchax_ckpt.stored import copy

logger = logging.getLogger(__name__)

LATEST = "latest"
CONTROL = ".publishing"
_RECORD = "record.json"
# Exactly the names that are given here; the last is of a lease.
_DRAFTS = re.compile(
    r"(writing|deleting)-step-[0-9]+(-[0-9]+)?"
    rf"|({re.escape(_RECORD)}|{LATEST}|lease-[0-9a-f]{{32}}){re.escape(permissions.DRAFT_SUFFIX)}"
)
_MAX_RECORD_BYTES = 1 << 26
_now_secs = time.time


@dataclasses.dataclass(frozen=True)
class Published:
    """A published folder; the commit time tells its step from others of the same number."""

    path: epath.Path
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
    def from_json(cls, out: epath.Path, entry: dict[str, Any]) -> Published:
        """Returns the folder of an entry; raises ValueError or KeyError if it is malformed."""
        name, step, replaced = entry["folder"], entry["step"], entry["replaced_secs"]
        committed, metrics = entry["commit_timestamp_nsecs"], entry["metrics"]
        kinds = [type(step), type(committed), type(metrics)]
        if kinds != [int, int, dict] or not isinstance(replaced, int | float | None):
            raise ValueError(f"malformed entry of {name!r:.80}")
        return cls(out / folder_name(name), step, committed, metrics, replaced)


def folder_name(name: Any) -> str:
    """Returns the name of a published folder; ValueError if it is none."""
    if not (isinstance(name, str) and name.startswith("step-") and Path(name).name == name):
        raise ValueError(f"expected the name of a folder, found {name!r:.80}")
    return name


class PublishedFolders:
    """The folders in OUT, in the order of their publication, all of one run and one format.

    ``on_bytes`` is called with the bytes that were just sent to a bucket, and may raise.
    """

    def __init__(
        self, out: epath.Path, run: str, format: str, on_bytes: Callable[[int], None]
    ) -> None:
        self.path = out
        self._on_bytes = on_bytes
        self._source = {"run": run, "format": format}
        self.published: Sequence[Published] = ()
        self._control = out / CONTROL
        self._medium = medium.of(out)
        self._lease = Lease(self._control)
        self._unfinished: Sequence[str] = ()

    def open(self) -> None:
        """Takes the lease of OUT, reads the record, removes what a killed program left.

        Later calls check the lease. After any error, the next call begins anew.
        """
        try:
            with storage_errors.translated("publish in", self.path):
                if self._lease.token:
                    self._lease.hold()
                    return
                self._medium.use(self)
                # Below OUT, so that nothing that a failed check leaves is taken for a user's file.
                medium.of(self._control).require_usable(for_writing=True)
                self._medium.refuse_unsafe()
                self._require_ours()
                self._medium.make_folder(self._control)
                self._lease.hold()
                self._require_ours()  # others may have written there before this had the lease
                published = tuple(self._recorded())
                self._finish()
                self._medium.remove_drafts(self._control, _DRAFTS)
                self.published = published
                self._point_to_newest()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Releases the lease of OUT, so that another program may publish there."""
        self._lease.release()

    @contextlib.contextmanager
    def writing(self, committed: CommittedStep, metrics: dict[str, Any]) -> Iterator[Path]:
        """Publishes the folder that the block writes to the yielded path, unless it raises."""
        step = committed.step
        self.open()  # the error of a step before released the lease
        try:
            with self._medium.draft(self._control / f"writing-step-{step}") as draft:
                yield draft
                with storage_errors.translated("publish in", self.path):
                    reused = self._equal_files(digests.write(draft))
                    before = self.published[-1].path if reused else self.path
                    commit_nsecs = committed.commit_timestamp_nsecs
                    new = Published(self._new_path(step), step, commit_nsecs, metrics)
                    self._medium.complete_draft(draft, before, reused)
                    self._record(self.published, [new.path.name])
                    self._medium.put_folder(draft, new.path, before, reused, self._send)
                    self._record((*self.published, new))
                    self._point_to_newest()
        except BaseException:
            with contextlib.suppress(Exception):  # else the next look removes it
                self._finish()
            self.close()  # so that the next look reads the record, and mends what names the newest
            raise

    def _send(self, draft: Path, target: epath.Path) -> None:
        copy.copy_files(epath.Path(draft), target, {}, self._on_bytes)

    def _equal_files(self, index: Mapping[str, Any]) -> list[str]:
        """Returns the files that have the same bytes in the folder before."""
        try:
            listed = digests.read(self.published[-1].path)
        except (LookupError, OSError, TypeError, ValueError, RecursionError):  # none, or damaged
            return []
        return [name for name, entry in index.items() if listed.get(name) == entry]

    def _finish(self) -> None:
        """Deletes the unfinished folders."""
        if self._unfinished:
            self._lease.hold()  # they may be another program's by now
        for name in self._unfinished:
            doomed = self._control / f"deleting-{name}"
            if not self._medium.remove_folder(self.path / name, doomed, digests.FILE):
                logger.warning(
                    "%s: not deleted, because it has no %s, so it may be somebody else's folder. "
                    "Delete it if nobody needs it",
                    self.path / name,
                    digests.FILE,
                )
        self._unfinished = ()

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
        with storage_errors.translated("delete folders from", self.path):
            self._finish()
            self._point_to_newest()
            if left != [*self.published]:
                self._record(left, [folder.path.name for folder in doomed])
                self._finish()

    def _require_ours(self) -> None:
        """Raises if OUT has entries but no record: ``latest``, for one, is a common name."""
        if os.path.islink(self._control):
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

    def _recorded(self) -> list[Published]:
        path = self._control / _RECORD
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_RECORD_BYTES)
        except FileNotFoundError:
            return []
        try:
            record = seals.unseal(json.loads(content))
            source = {key: record[key] for key in self._source}
            found = [Published.from_json(self.path, entry) for entry in record["published"]]
            self._unfinished = [folder_name(name) for name in record.get("unfinished", ())]
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

    def _record(self, published: Sequence[Published], unfinished: Sequence[str] = ()) -> None:
        entries = [folder.to_json() for folder in published]
        content = {**self._source, "published": entries, "unfinished": [*unfinished]}
        self._write(self._control / _RECORD, seals.encoded(content))
        self.published, self._unfinished = published, unfinished

    def _point_to_newest(self) -> None:
        path = self.path / LATEST
        if not self.published:
            with contextlib.closing(self._medium.record(path)) as record:
                if (seen := record.read()) is not None:
                    record.remove(seen)  # no later content, if a service carries it out late
            return
        content = f"{self.published[-1].path.name}\n".encode()
        with contextlib.suppress(FileNotFoundError):
            if path.read_bytes() == content:
                return
        self._write(path, content)

    def _write(self, path: epath.Path, content: bytes) -> None:
        """Replaces a small file: readers, and a loss of power, find the old content or the new."""
        self._lease.hold()
        draft = self._control / f"{path.name}{permissions.DRAFT_SUFFIX}"
        try:
            self._medium.replace_file(path, content, draft)
        except Conflict:
            raise LeaseError(f"{path}: another program has replaced it", path=path) from None

    def _new_path(self, step: int) -> epath.Path:
        used_names = {folder.path.name for folder in self.published}
        return self._medium.unused(self.path, f"step-{step}", but=used_names)
