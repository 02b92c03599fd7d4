"""A bucket: it has objects and no folders, and renames nothing; the commit mark makes a step.

One gap remains: a writer that lost its lease before its first write may later write into a step
that the next lease holder wrote.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import re
import secrets
import shlex
import tempfile
import urllib.parse
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
from etils import epath

from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.runtime import user_messages
from torchax_ckpt.storage.medium import bucket, storage_errors
from torchax_ckpt.storage.medium.compare_and_swap import AtomicRecord, Conflict, Seen
from torchax_ckpt.storage.medium.local_medium import Fence, IsOurs, LocalMedium, Send
from torchax_ckpt.storage.medium.stored_file import MARK, RECORD, Log, StoredFile, first_free

# The name of an empty object that marks a folder in which a save began and from which the save's
# files were removed.
BEGUN = "begun"
_USED_NAMES = 1000
_JOURNAL = "events/"
# The body of an upload in parts: metadata, of which there is none, and the content of a record.
_BOUNDARY = uuid.uuid4().hex
_PARTS = (
    f"--{_BOUNDARY}\r\nContent-Type: application/json\r\n\r\n{{}}\r\n"
    f"--{_BOUNDARY}\r\nContent-Type: application/octet-stream\r\n\r\nCONTENT\r\n--{_BOUNDARY}--\r\n"
).encode()


class BucketMedium(LocalMedium):
    """The bucket in which a prefix lies: one of Google's, and the base of others."""

    pause_secs = 10.0
    streamed_share = 1.0
    num_copies = 1  # the service guards objects against damage
    max_saves_in_full = 64

    def __init__(self, folder: epath.Path) -> None:
        super().__init__(folder)
        # The newest names of this program's saves -> their steps; older names were those of steps
        # up to ``_forgotten``.
        self._used_names: dict[str, int] = {}
        self._forgotten = -1

    # --- the storage ---

    def use(self, user: object) -> None:
        bucket.use(self._folder, user)

    def require_usable(self, *, for_writing: bool, name: str = "") -> bool:
        return bucket.check(self._folder, for_writing=for_writing, name=name)

    def refuse_unsafe(self) -> None:
        pass

    def prove_writable(self) -> None:
        probe = self._folder / ".torchax_ckpt_write_test"
        probe.write_bytes(b"")
        probe.unlink(missing_ok=True)  # a retried request may find it deleted already

    def require_own(self, path: epath.Path) -> None:
        pass  # whoever may create objects may exchange them, which no request tells

    # --- files and folders ---

    def make_folder(self, path: epath.Path) -> None:
        pass  # see ``make_inner_folder``

    def make_file(self, path: epath.Path) -> None:
        path.write_bytes(b"")

    def is_missing(self, path: epath.Path) -> bool:
        return False

    def is_plain(self, path: epath.Path, *, with_folder: bool = False) -> bool:
        return True  # a bucket has no links and no special files

    def files(self, folder: epath.Path, prefix: str = "") -> list[StoredFile]:
        with bucket.as_os_error(folder):
            found = bucket.listed(folder, prefix).items()
        return [StoredFile(name, int(info["size"]), str(info["crc32c"])) for name, info in found]

    def num_bytes(self, path: epath.Path) -> int:
        found = self.files(path.parent, path.name)
        return sum(file.num_bytes for file in found if file.name == path.name)

    def read(self, path: epath.Path, max_bytes: int | None = None) -> bytes:
        return bucket.read(path, max_bytes)

    def continues_at(self, num_bytes: int) -> int:
        return 0  # an object is written whole

    def remove_file(self, path: epath.Path) -> None:
        self._remove(path)

    def _remove(self, path: epath.Path) -> None:
        """Removes an object, or everything under a prefix, as it was listed."""
        bucket.remove(path)

    def _copy(
        self, source: epath.Path, target: epath.Path, names: Collection[str] | None = None
    ) -> None:
        """Copies objects under a prefix, all or those of these names, within the service."""
        bucket.copy(source, target, names)

    def _move(self, path: epath.Path, target: epath.Path) -> None:
        path.rename(target)

    def new_log(self, path: epath.Path) -> Log:
        return BucketLog(path)

    def record(self, path: epath.Path, **limits: int) -> AtomicRecord:
        return BucketRecord(str(path))

    def take_over(
        self, source: epath.Path, target: epath.Path, names: Collection[str] | None = None
    ) -> None:
        self._copy(source, target, names)

    def remove_retained(
        self, path: epath.Path, doomed: epath.Path, is_ours: IsOurs, fence: Fence
    ) -> None:
        pass  # only copies that a step would lack are retained

    def how_taken_over(self, folder: epath.Path) -> str:
        return "as copies that the storage service made"

    def wait_longer(self, step: str, problem: str) -> None:
        raise TimeoutError(
            f"{problem}, less than CheckpointOptions(min_read_bytes_per_sec=...) allows for "
            "process_timeout_secs. The step may be intact: check the network and the service's "
            "status, then try again."
        )

    def kvstore(self, folder: epath.Path) -> dict[str, Any]:
        name, _, prefix = str(folder).removeprefix("gs://").partition("/")
        return {"driver": "gcs", "bucket": name, "path": f"{prefix}/"}

    def database_to_read(self, folder: epath.Path) -> dict[str, Any]:
        coalescing = "experimental_read_coalescing_"
        return {
            "base": self.kvstore(folder),
            # Neighbouring reads are joined to one request.
            coalescing + "threshold_bytes": 1 << 20,
            coalescing + "merged_bytes": 64 << 20,
            coalescing + "interval": "1ms",
        }

    def database_to_write(self, folder: epath.Path) -> dict[str, Any]:
        return {"base": self.kvstore(folder)}

    # --- folders that are published whole ---

    @contextlib.contextmanager
    def draft(self, path: epath.Path) -> Iterator[Path]:
        # Tensors are written in pieces, in any order, as no object of a bucket can be.
        try:
            folder = tempfile.TemporaryDirectory(prefix="torchax-ckpt-", ignore_cleanup_errors=True)
        except OSError as error:
            raise DirectoryError(
                f"cannot publish to {self._folder}: {storage_errors.said(error)}. Set TMPDIR to a "
                "folder of this host with room for the weights",
                path=self._folder,
            ) from error
        with folder as place:
            yield Path(place, path.name)

    def remove_drafts(self, folder: epath.Path, names: re.Pattern[str]) -> None:
        pass  # they were on the host that was killed

    def complete_draft(self, draft: Path, before: epath.Path, reused: Sequence[str]) -> None:
        pass

    def put_folder(
        self, draft: Path, target: epath.Path, before: epath.Path, reused: Sequence[str], send: Send
    ) -> None:
        there = self.files(before) if reused else []
        equal = [name for name in reused if _as_object(draft, name) in there]
        if equal:
            with contextlib.suppress(OSError):  # one was deleted, or the service refuses copies
                self._copy(before, target, equal)
                for name in equal:
                    (draft / name).unlink()
        send(draft, target)

    def remove_folder(self, path: epath.Path, doomed: epath.Path, sign: str) -> bool:
        self._remove(path)  # perhaps a part of a folder, without the sign
        return True

    def replace_file(self, path: epath.Path, content: bytes, draft: epath.Path) -> None:
        record = self.record(path)
        record.swap(record.read(), content)  # a late request for an older content then fails

    # --- steps that are read ---

    def around(self, path: epath.Path) -> Iterator[epath.Path]:
        return iter(())  # ``require_usable`` tells whether the path itself has a mark

    def has_run(self, folder: epath.Path, is_step: Callable[[epath.Path], bool]) -> bool:
        # One request shows the journal, many the steps.
        return any(file.name.endswith(".jsonl") for file in self.files(folder, _JOURNAL))

    def command_to_move(self, patterns: Sequence[str], new: str) -> str:
        sources = " ".join(f"{shlex.quote(str(self._folder))}/{each}" for each in patterns)
        return f"gcloud storage mv {sources} {shlex.quote(new)}/"

    def is_complete(self, step: epath.Path) -> bool:
        return (step / MARK).exists()

    def was_committed(self, folder: epath.Path, parts: Collection[str]) -> bool:
        # A mark without other files comes from a late request of a save that was given up and
        # removed.
        names = self.names_in(folder)
        return MARK in names and not {RECORD, *parts}.isdisjoint(names)

    def is_puzzling(self, folder: epath.Path) -> bool:
        return False  # a save writes here under the step's name

    def require_contained(self, path: epath.Path, step: int) -> None:
        pass

    def pointer_in(self, path: epath.Path) -> str | None:
        return None

    # --- steps that are written ---

    def begin(self, step: int, token: str) -> epath.Path:
        # A late request of a failed save could overwrite what a later save writes under the same
        # name. This program has made fewer saves than ``_num_begun``.
        self._num_begun += 1
        num_used = self._num_begun if step <= self._forgotten else 0
        names = (str(step), f"incoming-{step}")
        path = first_free(self._folder, names, but=self._used_names, num_used=num_used)
        self._used_names[path.name] = step
        if len(self._used_names) > _USED_NAMES:
            oldest = next(iter(self._used_names))
            self._forgotten = max(self._forgotten, self._used_names.pop(oldest))
        self._unkept[path] = path
        return path

    def make_closed_folder(self, step: epath.Path) -> None:
        pass

    def make_inner_folder(self, path: epath.Path) -> None:
        # A bucket creates a folder with the first object in it. gcsfs would first ask whether the
        # bucket exists, and takes an empty one for missing if it may not read its metadata.
        pass

    def finish(self, step: epath.Path, *, synced: str = "") -> None:
        pass  # the service has stored an object before it says so

    def publish(self, step: int, written: epath.Path, fence: Fence) -> epath.Path:
        return written

    def take_back(self, fence: Fence) -> None:
        # A request whose answer was lost may be carried out later, so each call looks again, until
        # the files of the step are removed too, and ``let_go`` is called.
        for path in self._unkept:
            fence()
            self._remove(path / MARK)

    def final_path(self, path: epath.Path, step: int) -> epath.Path:
        return path  # it keeps the name under which it was written

    def set_aside(self, path: epath.Path, target: epath.Path, fence: Fence) -> OSError | None:
        fence()
        # A bucket renames object by object. If the process is killed meanwhile, two parts without a
        # mark remain, which are removed later, and never a folder that looks like a step.
        mark = (path / MARK).read_text(encoding="utf-8")
        self._remove(path / MARK)
        self._move(path, target)
        (target / MARK).write_text(mark, encoding="utf-8")
        return None

    def delete(self, path: epath.Path, step: int, fence: Fence) -> OSError | None:
        self._remove(path / MARK)
        self._remove(path)
        return None

    def remove_left(self, path: epath.Path, *, is_named_as_step: bool) -> None:
        self._remove(path)
        if is_named_as_step:  # a late request must not find its name in use by a later save
            (path / BEGUN).write_bytes(b"")


class OnceNamedMedium(BucketMedium):
    """A store that does not tell two writes of the same bytes apart.

    No folder ever has the name of another, so that a late request finds nothing else.
    """

    def unused(self, folder: epath.Path, name: str, but: Collection[str] = ()) -> epath.Path:
        return folder / f"{name}-{secrets.randbelow(10**15):015d}"

    def begin(self, step: int, token: str) -> epath.Path:
        path = self.unused(self._folder, f"incoming-{step}")
        self._unkept[path] = path
        return path

    def remove_left(self, path: epath.Path, *, is_named_as_step: bool) -> None:
        self._remove(path)


class PlainMedium(OnceNamedMedium):
    """A plain store, in which only a mirror can be: it lists, reads, writes and deletes files.

    No request is conditional. A second writer is noticed, as a rule, but not excluded.
    """

    def use(self, user: object) -> None:
        pass

    def require_usable(self, *, for_writing: bool, name: str = "") -> bool:
        with storage_errors.translated("read", self._folder):
            return (self._folder / (name or MARK)).exists() and name != ""

    def prove_writable(self) -> None:
        super().prove_writable()
        user_messages.warn(
            f"{self._folder}: this store has no conditional writes, so the lease of this mirror "
            "does not exclude a second program that starts at the same time. Let one program at a "
            "time write to it, or give a mirror in gs:// or s3://."
        )

    def kvstore(self, folder: epath.Path) -> dict[str, Any]:
        raise DirectoryError(
            f"{folder}: expected arrays on a disk, or in a bucket of gs:// or s3://, found them in "
            "a store that TensorStore does not read. Fetch the newest step of this mirror: "
            "torchax-ckpt fetch URL DIRECTORY",
            path=folder,
        )

    def make_folder(self, path: epath.Path) -> None:
        path.ask("makedirs", exist_ok=True)

    make_inner_folder = make_folder

    def files(self, folder: epath.Path, prefix: str = "") -> list[StoredFile]:
        try:
            return [StoredFile(*found) for found in folder.files() if found[0].startswith(prefix)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, path: epath.Path, max_bytes: int | None = None) -> bytes:
        return path.read_bytes(max_bytes)

    def record(self, path: epath.Path, **limits: int) -> AtomicRecord:
        return PlainRecord(path)

    def _remove(self, path: epath.Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            path.ask("rm", recursive=True)

    def _copy(
        self, source: epath.Path, target: epath.Path, names: Collection[str] | None = None
    ) -> None:
        raise OSError(errno.ENOTSUP, "this store makes no copies", str(source))

    def set_aside(self, path: epath.Path, target: epath.Path, fence: Fence) -> OSError | None:
        return OSError(errno.EPERM, "this store renames no folders", str(path))


class BucketLog(Log):
    """An object that is written anew with more content; a bucket has no appends."""

    _content = b""

    def append(self, content: bytes) -> None:
        self._path.write_bytes(self._content + content)
        self._content += content


class BucketRecord(AtomicRecord):
    """A record in a bucket, with the credentials and retries of gcsfs."""

    def __init__(self, url: str) -> None:
        self._bucket, _, self._key = url.partition("://")[2].partition("/")
        # The same arguments as etils uses for paths, so that both share one session.
        self._fs = fsspec.filesystem("gcs", finalize_on_close=True)

    def read(self) -> Seen | None:
        try:
            headers, content = self._object("GET", alt="media")
        except FileNotFoundError:
            return None
        generation = headers["x-goog-generation"]
        return Seen(content, generation, generation)

    def swap(self, seen: Seen | None, content: bytes) -> Seen:
        place = f"/upload/storage/v1/b/{urllib.parse.quote(self._bucket)}/o"
        try:
            made = self._call(
                "POST",
                self._fs.base.replace("/storage/v1/", place),
                uploadType="multipart",
                name=self._key,
                ifGenerationMatch=seen.version if seen else "0",
                headers={"Content-Type": f'multipart/related; boundary="{_BOUNDARY}"'},
                data=_PARTS.replace(b"CONTENT", content),
                json_out=True,
            )
        except FileExistsError:  # gcsfs raises this for "precondition failed"
            # The request may have succeeded; if its answer was lost, gcsfs sent it again.
            now = self.read()
            if now is None or now.content != content:
                raise Conflict from None
            return now
        return Seen(content, made["generation"])

    def sync_name(self) -> None:
        pass

    def remove_drafts(self, age_secs: float) -> None:
        pass

    def remove(self, seen: Seen) -> None:
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            self._object("DELETE", ifGenerationMatch=seen.version)

    def _object(self, method: str, **query: str) -> Any:
        return self._call(method, "b/{}/o/{}", self._bucket, self._key, **query)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        with bucket.as_os_error(f"gs://{self._bucket}/{self._key}"):
            return self._fs.call(*args, **kwargs)

    def place(self) -> str:
        return ""

    def is_orphaned(self) -> bool:
        return False

    def close(self) -> None:
        pass


class PlainRecord(BucketRecord):
    """A record in a store that compares nothing: a change between look and write is lost."""

    def __init__(self, path: epath.Path) -> None:
        self._path = path

    def read(self) -> Seen | None:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        return Seen(content, content.hex())

    def swap(self, seen: Seen | None, content: bytes) -> Seen:
        if self.read() != seen:
            raise Conflict
        self._path.write_bytes(content)
        return Seen(content, content.hex())

    def remove(self, seen: Seen) -> None:
        if self.read() == seen:
            self._path.unlink(missing_ok=True)


def _as_object(folder: Path, name: str) -> StoredFile:
    """Returns how a file of this host is listed once it is an object of a bucket."""
    import google_crc32c  # of the extra gcs

    checksum = google_crc32c.Checksum()
    with (folder / name).open("rb") as file:
        for _ in checksum.consume(file, 1 << 20):
            pass
    crc32c = base64.b64encode(checksum.digest()).decode()
    return StoredFile(name, (folder / name).stat().st_size, crc32c)
