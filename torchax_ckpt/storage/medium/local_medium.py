"""A disk, or another file system: folders are renamed at once, and files get second names (links).

On a disk, the name makes a step. A step that cannot be renamed, such as one in a lower layer of
overlayfs, therefore stays as it is: half deleted under its number, it would be taken for a damaged
step, and by Orbax for a whole one.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import logging
import os
import re
import shlex
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from etils import epath

from torchax_ckpt.runtime.stages import stage
from torchax_ckpt.storage.medium import containment, fsync, location, permissions
from torchax_ckpt.storage.medium.stored_file import MARK, RECORD, StoredFile, first_free

logger = logging.getLogger(__name__)

# What file systems answer that have no hard links, allow none here, or too few for one file.
_REFUSALS = {
    *(errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK),
    *(errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL),
}
_has_warned = False


class LocalMedium:
    """The file system in which a folder lies; see ``Medium``."""

    append_secs = 0.1
    watch_secs = 2.0
    streamed_share = 0.25
    has_links = True
    answers_at_once = True
    gives_up_slow_reads = False

    def __init__(self, folder: epath.Path) -> None:
        self._folder = folder
        self._num_begun = 0
        # The folders that were renamed by saves that have not ended well -> their names before.
        self._published: dict[epath.Path, epath.Path] = {}

    # --- files and folders ---

    def use(self, user: object) -> None:
        pass

    def require_usable(self, *, for_writing: bool, name: str = "") -> bool:
        return False  # the first file that is written shows it

    def is_missing(self, path: epath.Path) -> bool:
        return not location.exists(path)

    def names_in(self, folder: epath.Path) -> set[str]:
        try:
            return set() if os.path.islink(folder) else set(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return set()

    def files(self, folder: epath.Path, prefix: str = "") -> list[StoredFile]:
        found = []
        try:
            for top in os.listdir(folder):
                if top.startswith(prefix):
                    for path, status in containment.walk(folder / top):
                        name = os.path.relpath(path, folder)
                        identity = status.st_dev, status.st_ino
                        found.append(
                            StoredFile(name, status.st_size, "", identity, status.st_nlink)
                        )
        except (FileNotFoundError, NotADirectoryError):
            return []
        return found

    def num_bytes(self, path: epath.Path) -> int:
        return os.lstat(path).st_size if os.path.lexists(path) else 0

    def read(self, path: epath.Path) -> bytes:
        return path.read_bytes()

    def beginning(self, path: epath.Path, max_bytes: int) -> bytes:
        # A link may lead elsewhere, and to open a pipe would block.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with (
            _opened(path.parent) as folder,
            os.fdopen(os.open(path.name, flags, dir_fd=folder), "rb") as file,
        ):
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            return file.read(max_bytes) if is_regular else b""

    def remove_file(self, path: epath.Path) -> None:
        with _opened(path.parent) as folder, contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)

    def new_log(self, path: epath.Path) -> LocalLog:
        # Does not create the folder above: whoever removed it, or replaced it by a link, did so on
        # purpose.
        with contextlib.suppress(FileExistsError):
            os.mkdir(path.parent, 0o775)
        return LocalLog(path)

    def remove_left(self, path: epath.Path, *, is_named_as_step: bool) -> None:
        try:
            path.unlink() if os.path.islink(path) else path.rmtree()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise
            logger.debug("%s is still being written to: it will be removed later", path)

    def sync_open(self, file: IO[bytes]) -> None:
        file.flush()
        os.fsync(file.fileno())

    def take_over(self, source: epath.Path, target: epath.Path) -> None:
        link_folder(source, target)

    def how_taken_over(self, folder: epath.Path) -> str:
        if all(file.num_links == 1 for file in self.files(folder)):
            return "as copies, because this file system has no hard links"
        return (
            "as hard links. cp -r copies a linked file once for each step; cp -a, rsync -H and "
            "torchax-ckpt copy keep the links"
        )

    def database_to_read(self, folder: epath.Path) -> dict[str, Any]:
        return {"base": location.kvstore(folder)}

    def database_to_write(self, folder: epath.Path) -> dict[str, Any]:
        base: dict[str, Any] = dict(location.kvstore(folder))
        # Nobody reads a data file before the index, so only the index is written by a rename.
        return {"base": {**base, "file_io_locking": {"mode": "non_atomic"}}, "manifest": base}

    # --- folders that are published whole ---

    @contextlib.contextmanager
    def draft(self, path: epath.Path) -> Iterator[Path]:
        _remove(path)  # if that has failed before
        try:
            yield Path(path)
        finally:
            _remove(path)

    def remove_drafts(self, folder: epath.Path, names: re.Pattern[str]) -> None:
        for name in filter(names.fullmatch, os.listdir(folder)):
            _remove(folder / name)

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
        for name in shared:
            file, link = before / name, Path(draft, f"{name}.link")
            with contextlib.suppress(OSError):  # this file system has no links, or no more of it
                if filecmp.cmp(file, draft / name, shallow=False):  # else it was damaged
                    os.link(file, link, follow_symlinks=False)
                    link.replace(draft / name)
        fsync.sync_tree(epath.Path(draft))
        ended()
        draft.rename(target)

    def unname(self, path: epath.Path, doomed: epath.Path) -> bool:
        if path.exists():
            _remove(doomed)
            path.rename(doomed)
            # Else a loss of power could leave the folder's name with a part of its files.
            for folder in (path.parent, doomed.parent):
                fsync.sync(folder)
            _remove(doomed)
        return True

    def remove_unfinished(self, path: epath.Path) -> None:
        pass  # a folder gets its name when it is whole, and loses it at once

    def replace_file(self, path: epath.Path, content: bytes, draft: epath.Path) -> None:
        draft.unlink(missing_ok=True)
        permissions.write_file(Path(draft), content)
        fsync.swap_in(Path(draft), Path(path))

    # --- steps ---

    def around(self, path: epath.Path) -> Iterator[epath.Path]:
        place = location.real(path)
        yield from (place, *place.parents)

    def has_run(self, folder: epath.Path, is_step: Callable[[epath.Path], bool]) -> bool:
        return folder.is_dir() and any(map(is_step, folder.iterdir()))

    def command_to_move(self, new: str) -> str:
        return f"mkdir {shlex.quote(new)} && mv"

    def is_complete(self, step: epath.Path) -> bool:
        return True  # only a commit gives the name

    def was_committed(self, names: Collection[str], parts: Collection[str]) -> bool:
        return not {MARK, RECORD}.isdisjoint(names) or set(names).issuperset(parts)

    def is_puzzling(self, folder: epath.Path) -> bool:
        if os.path.islink(folder):
            return True
        return any(folder.iterdir()) if folder.is_dir() else folder.exists()

    def begin(self, step: int, token: str) -> epath.Path:
        # A unique name: no late write of a failed save or a stalled writer joins a later step.
        self._num_begun += 1
        return self._folder / f"writing-{step}-{token}-{self._num_begun}"

    def publish(self, step: int, written: epath.Path, fence: Callable[[], None]) -> epath.Path:
        path = first_free(self._folder, (str(step), f"incoming-{step}"))
        fence()
        self._published[path] = written
        written.rename(path)
        fsync.sync(self._folder)
        return path

    def keep(self, path: epath.Path) -> None:
        self._published.pop(path, None)

    def take_back(self, fence: Callable[[], None]) -> None:
        for path, written in list(self._published.items()):
            fence()
            if not os.path.lexists(written):  # else the folder did not get the other name
                with contextlib.suppress(FileNotFoundError):  # somebody has removed it
                    path.rename(written)
            fsync.sync(self._folder)  # before its files are removed
            del self._published[path]

    def let_go(self) -> None:
        self._published.clear()

    def settle(
        self,
        path: epath.Path,
        final: epath.Path,
        set_aside: Callable[[], OSError | None],
        fence: Callable[[], None],
    ) -> bool:
        return not ((final.exists() and set_aside()) or self.set_aside(path, final, fence))

    def set_aside(
        self, path: epath.Path, target: epath.Path, fence: Callable[[], None]
    ) -> OSError | None:
        fence()
        try:
            path.rename(target)
        except FileNotFoundError:  # another process has removed it
            raise
        except OSError as error:
            return error
        return None

    def delete(self, path: epath.Path, step: int, fence: Callable[[], None]) -> OSError | None:
        if not path.exists():
            return None  # another process has removed it
        doomed = first_free(self._folder, (f"deleting-{step}",))
        if refusal := self.set_aside(path, doomed, fence):
            return refusal
        fsync.sync(self._folder)  # else a loss of power could leave the name without the files
        doomed.rmtree()
        return None


class LocalLog:
    """A file to which content is appended."""

    def __init__(self, path: epath.Path) -> None:
        self._path = path
        self._is_torn = False

    def append(self, content: bytes) -> None:
        if self._is_torn:
            content = b"\n" + content
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._is_torn = True
        with _opened(self._path.parent) as folder:
            file = os.open(self._path.name, flags, 0o664, dir_fd=folder)
            try:
                while content:
                    content = content[os.write(file, content) :]
            finally:
                os.close(file)
        self._is_torn = False


def _remove(path: epath.Path) -> None:
    """Removes a file or folder that nothing names any more; a failure is only logged."""
    try:
        if path.is_dir() and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)


@contextlib.contextmanager
def _opened(folder: epath.Path) -> Iterator[int]:
    """Yields a file descriptor of a folder; raises OSError for a link."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield opened
    finally:
        os.close(opened)


@stage("link unchanged arrays")
def link_folder(source: epath.Path, target: epath.Path, *, may_copy: bool = True) -> None:
    """Creates a folder whose files are hard links to another folder's files, at any depth.

    The names of the new files are durable then, but not that of ``target`` in the folder above.
    """
    for folder, _, files in os.walk(source, onerror=fsync.raise_error):
        new = os.path.join(target, os.path.relpath(folder, source))
        os.makedirs(new, exist_ok=True)
        for name in files:
            link_file(os.path.join(folder, name), os.path.join(new, name), may_copy=may_copy)
        fsync.sync(new)


def link_file(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, may_copy: bool = True
) -> None:
    """Gives a file a second name, not yet durable; copies it if the file system refuses links."""
    if not stat.S_ISREG(os.lstat(source).st_mode):
        raise OSError(errno.ELOOP, "expected a regular file", os.fspath(source))
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _REFUSALS or not may_copy:
            raise
        global _has_warned
        if not _has_warned:
            _has_warned = True
            logger.warning(
                "%s: cannot be linked from %s (%s). Unchanged arrays are copied from step to step "
                "in place of links, which takes time and space. Use a file system with hard links, "
                "or CheckpointOptions(reuse=False)",
                os.fspath(target),
                os.fspath(source),
                error.strerror,
            )
        shutil.copyfile(source, target, follow_symlinks=False)
        fsync.sync(epath.Path(target))
