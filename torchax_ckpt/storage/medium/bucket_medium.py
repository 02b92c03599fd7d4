"""A bucket: it has objects and no folders, and renames nothing; the commit mark makes a step.

One gap remains: a writer that lost its lease before its first write may later write into a step
that the next lease holder wrote.
"""

from __future__ import annotations

import base64
import contextlib
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from etils import epath

from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.storage.medium import bucket, compare_and_swap, location, storage_errors
from torchax_ckpt.storage.medium.stored_file import MARK, RECORD, StoredFile, first_free

# The name of an empty object that marks a folder in which a save began and from which the save's
# files were removed.
BEGUN = "begun"
_USED_NAMES = 1000
_JOURNAL = "events/"


class BucketMedium:
    """The bucket in which a prefix lies; see ``Medium``."""

    append_secs = 10.0
    watch_secs = 10.0
    streamed_share = 1.0
    has_links = False
    answers_at_once = False
    gives_up_slow_reads = True

    def __init__(self, folder: epath.Path) -> None:
        self._folder = folder
        self._num_begun = 0
        # The newest names of this program's saves -> their steps; older names were those of steps
        # up to ``_forgotten``.
        self._used_names: dict[str, int] = {}
        self._forgotten = -1
        self._begun: set[epath.Path] = set()  # by saves that have not ended well

    # --- files and folders ---

    def use(self, user: object) -> None:
        bucket.use(self._folder, user)

    def require_usable(self, *, for_writing: bool, name: str = "") -> bool:
        return bucket.check(self._folder, for_writing=for_writing, name=name)

    def is_missing(self, path: epath.Path) -> bool:
        return False  # a prefix without objects may get some

    def names_in(self, folder: epath.Path) -> set[str]:
        try:
            return {child.name for child in folder.iterdir()}
        except (FileNotFoundError, NotADirectoryError):
            return set()

    def files(self, folder: epath.Path, prefix: str = "") -> list[StoredFile]:
        found = bucket.contents(folder, prefix)
        return [StoredFile(name, size, crc32c) for name, (size, crc32c) in found.items()]

    def num_bytes(self, path: epath.Path) -> int:
        return bucket.contents(path.parent, path.name).get(path.name, (0, ""))[0]

    def read(self, path: epath.Path) -> bytes:
        return bucket.read(path)

    def beginning(self, path: epath.Path, max_bytes: int) -> bytes:
        with path.open("rb") as file:
            return bytes(file.read(max_bytes))

    def remove_file(self, path: epath.Path) -> None:
        bucket.remove(path)

    def new_log(self, path: epath.Path) -> BucketLog:
        return BucketLog(path)

    def remove_left(self, path: epath.Path, *, is_named_as_step: bool) -> None:
        bucket.remove(path)
        if is_named_as_step:  # a late request must not find its name in use by a later save
            (path / BEGUN).write_bytes(b"")

    def sync_open(self, file: IO[bytes]) -> None:
        pass  # the service has stored an object before it says so

    def take_over(self, source: epath.Path, target: epath.Path) -> None:
        bucket.copy(source, target)

    def how_taken_over(self, folder: epath.Path) -> str:
        return "as copies that the storage service made"

    def database_to_read(self, folder: epath.Path) -> dict[str, Any]:
        coalescing = "experimental_read_coalescing_"
        return {
            "base": location.kvstore(folder),
            # Neighbouring reads are joined to one request.
            coalescing + "threshold_bytes": 1 << 20,
            coalescing + "merged_bytes": 64 << 20,
            coalescing + "interval": "1ms",
        }

    def database_to_write(self, folder: epath.Path) -> dict[str, Any]:
        return {"base": location.kvstore(folder)}

    # --- folders that are published whole ---

    @contextlib.contextmanager
    def draft(self, path: epath.Path) -> Iterator[Path]:
        # Tensors are written in pieces, in any order, as no object of a bucket can be.
        place = _temporary_folder(self._folder)
        try:
            yield place / path.name
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def remove_drafts(self, folder: epath.Path, names: re.Pattern[str]) -> None:
        pass  # they were on the host that was killed

    def put_folder(
        self,
        draft: Path,
        target: epath.Path,
        before: epath.Path,
        shared: Sequence[str],
        *,
        begun: Callable[[], None],
        send: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        begun()
        there = bucket.contents(before, "") if shared else {}
        equal = [name for name in shared if there.get(name) == _as_object(draft / name)]
        if equal:
            with contextlib.suppress(OSError):  # one was deleted, or the service refuses copies
                bucket.copy(before, target, equal)
                for name in equal:
                    (draft / name).unlink()
        send()
        ended()

    def unname(self, path: epath.Path, doomed: epath.Path) -> bool:
        return False

    def remove_unfinished(self, path: epath.Path) -> None:
        bucket.remove(path)

    def replace_file(self, path: epath.Path, content: bytes, draft: epath.Path) -> None:
        record = compare_and_swap.record_at(path)
        record.swap(record.read(), content)  # which no late request can undo

    # --- steps ---

    def around(self, path: epath.Path) -> Iterator[epath.Path]:
        return iter(())  # ``require_usable`` tells whether the path itself has a mark

    def has_run(self, folder: epath.Path, is_step: Callable[[epath.Path], bool]) -> bool:
        # One request shows the journal, many the steps.
        return any(file.name.endswith(".jsonl") for file in self.files(folder, _JOURNAL))

    def command_to_move(self, new: str) -> str:
        return "gcloud storage mv"

    def is_complete(self, step: epath.Path) -> bool:
        return (step / MARK).exists()

    def was_committed(self, names: Collection[str], parts: Collection[str]) -> bool:
        # A mark without other files comes from a late request of a save that was given up and
        # removed.
        return MARK in names and not {RECORD, *parts}.isdisjoint(names)

    def is_puzzling(self, folder: epath.Path) -> bool:
        return False  # a save writes here under the step's name

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
        self._begun.add(path)
        return path

    def publish(self, step: int, written: epath.Path, fence: Callable[[], None]) -> epath.Path:
        return written

    def keep(self, path: epath.Path) -> None:
        self._begun.discard(path)

    def take_back(self, fence: Callable[[], None]) -> None:
        for path in list(self._begun):
            fence()
            bucket.remove(path / MARK)
            self._begun.discard(path)

    def let_go(self) -> None:
        self._begun.clear()

    def settle(
        self,
        path: epath.Path,
        final: epath.Path,
        set_aside: Callable[[], OSError | None],
        fence: Callable[[], None],
    ) -> bool:
        return False

    def set_aside(
        self, path: epath.Path, target: epath.Path, fence: Callable[[], None]
    ) -> OSError | None:
        fence()
        # A bucket renames object by object. If the process is killed meanwhile, two parts without a
        # mark remain, which are removed later, and never a folder that looks like a step.
        mark = (path / MARK).read_text(encoding="utf-8")
        bucket.remove(path / MARK)
        path.rename(target)
        (target / MARK).write_text(mark, encoding="utf-8")
        return None

    def delete(self, path: epath.Path, step: int, fence: Callable[[], None]) -> OSError | None:
        bucket.remove(path / MARK)
        bucket.remove(path)
        return None


class BucketLog:
    """An object that is written anew with more content; a bucket has no appends."""

    def __init__(self, path: epath.Path) -> None:
        self._path = path
        self._content = b""

    def append(self, content: bytes) -> None:
        self._path.write_bytes(self._content + content)
        self._content += content


def _temporary_folder(out: epath.Path) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="torchax-ckpt-"))
    except OSError as error:
        raise DirectoryError(
            f"cannot publish to {out}: {storage_errors.said(error)}. Set TMPDIR to a folder of "
            "this host with room for the weights",
            path=out,
        ) from error


def _as_object(path: Path) -> tuple[int, str]:
    """Returns the bytes and CRC32C that an object of a bucket with the content of a file has."""
    import google_crc32c  # of the extra gcs

    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        for _ in checksum.consume(file, 1 << 20):
            pass
    return path.stat().st_size, base64.b64encode(checksum.digest()).decode()
