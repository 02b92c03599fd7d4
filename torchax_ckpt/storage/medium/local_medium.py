"""A disk, or another file system: folders are renamed at once, and files get second names (links).

``LocalMedium`` is also the base of every other storage: its docstrings say what each method is for,
and its bodies are what a disk does. Another kind of store is one more class, which overrides what
differs (``BucketMedium``). Callers ask a medium to do things, and never of which kind it is.

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
from typing import Any

from etils import epath

from torchax_ckpt.runtime.stages import stage
from torchax_ckpt.storage.medium import containment, fsync, location, permissions, seals
from torchax_ckpt.storage.medium.compare_and_swap import AtomicRecord
from torchax_ckpt.storage.medium.stored_file import (
    MARK,
    RECORD,
    Log,
    StoredFile,
    first_free,
    opened,
)

logger = logging.getLogger(__name__)

# What file systems answer that have no hard links, allow none here, or too few for one file.
_REFUSALS = {
    *(errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK),
    *(errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL),
}
_has_warned = False

Fence = Callable[[], None]
"""Raises LeaseError unless this program still holds the lease of the directory."""
IsOurs = Callable[[epath.Path], bool]
"""Returns whether this package has made a folder, given its path."""
Send = Callable[[Path, epath.Path], None]
"""Copies the files of a folder of this host to another folder, one by one."""


class LocalMedium:
    """The storage in which one folder lies, such as the directory of a run.

    The methods that begin, commit and take back steps do so in this folder; the others take paths
    anywhere on the same storage. All raise OSError, or an error of a bucket's client, if storage
    fails.
    """

    pause_secs = 0.1
    """Seconds between two appends to one file; a service limits the writes of one object."""
    streamed_share = 0.25
    """The share of the bytes in flight that keep this storage busy. A disk needs less of them than
    a bucket, and memory that was freed lately is faster."""
    num_copies = 2
    """How many copies of each frozen array a run needs, so that damage to one file spares one."""
    max_saves_in_full = 0
    """The most saves that write all arrays after saves that reused files have failed. A service may
    refuse copies; where a disk refuses links, this package copies the files."""

    def __init__(self, folder: epath.Path) -> None:
        self._folder = folder
        self._num_begun = 0
        # What saves wrote that have not ended well: the path at which it may be a step -> its path
        # before.
        self._unkept: dict[epath.Path, epath.Path] = {}

    # --- the storage ---

    def use(self, user: object) -> None:
        """Gives the clients of the storage this package's settings while ``user`` exists."""

    def require_usable(self, *, for_writing: bool, name: str = "") -> bool:
        """Raises DirectoryError if the storage cannot be reached, or lacks permissions.

        The answer is True if the folder has a file ``name`` and this check has shown it; False if
        there is none, or if another request would be needed to tell.
        """
        return False  # the first file that is written shows it

    def refuse_unsafe(self) -> None:
        """Raises DirectoryError where commits and leases are not safe, as on mounted buckets."""
        permissions.refuse_object_store(self._folder)

    def prove_writable(self) -> None:
        """Creates and removes a file; warns if the storage lacks what commits and leases need."""
        permissions.prove_writable(self._folder)

    def require_own(self, path: epath.Path) -> None:
        """Raises DirectoryError if others may write a file that runs as code, or exchange it."""
        permissions.require_own(path)

    # --- files and folders ---

    def make_folder(self, path: epath.Path) -> None:
        """Creates a folder and missing parents, not writable by everybody; syncs their names."""
        permissions.make_folder(path)

    def make_file(self, path: epath.Path) -> None:
        """Creates an empty file, if it is missing; the new file is not writable by everybody."""
        with contextlib.suppress(FileExistsError):
            permissions.write_file(Path(path), b"")

    def is_missing(self, path: epath.Path) -> bool:
        """Returns True if nothing is there; False in a bucket, where it would cost a request."""
        return not location.exists(path)

    def is_plain(self, path: epath.Path, *, with_folder: bool = False) -> bool:
        """Returns True if a file is missing, or regular with at most ``MAX_JSON_BYTES``.

        With ``with_folder``, its folder must be none or a true folder, and no link to one.
        """
        try:
            if with_folder and not stat.S_ISDIR(os.lstat(path.parent).st_mode):
                return False
            status = os.lstat(path)
        except FileNotFoundError:
            return True
        return stat.S_ISREG(status.st_mode) and status.st_size <= seals.MAX_JSON_BYTES

    def names_in(self, folder: epath.Path) -> set[str]:
        """Returns the names in a folder; none if it is a link, no folder, or does not exist."""
        try:
            return set() if os.path.islink(folder) else {path.name for path in folder.iterdir()}
        except (FileNotFoundError, NotADirectoryError):
            return set()

    def files(self, folder: epath.Path, prefix: str = "") -> list[StoredFile]:
        """Lists the files below a folder whose names below it begin with ``prefix``.

        Returns none if there is no folder, or if another program removes it meanwhile.
        """
        try:
            tops = [folder / name for name in os.listdir(folder) if name.startswith(prefix)]
            found = [each for top in tops for each in containment.walk(top)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [
            StoredFile(
                os.path.relpath(path, folder), s.st_size, "", (s.st_dev, s.st_ino), s.st_nlink
            )
            for path, s in found
        ]

    def num_bytes(self, path: epath.Path) -> int:
        """Returns the size of a file, without reading it; 0 if there is none."""
        return os.lstat(path).st_size if os.path.lexists(path) else 0

    def read(self, path: epath.Path, max_bytes: int | None = None) -> bytes:
        """Returns the first bytes of a file of any origin, or all; b"" unless it is regular."""
        # A link may lead elsewhere, and to open a pipe would block.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with (
            opened(path.parent) as folder,
            os.fdopen(os.open(path.name, flags, dir_fd=folder), "rb") as file,
        ):
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            return file.read(max_bytes) if is_regular else b""

    def continues_at(self, num_bytes: int) -> int:
        """Returns at which byte to go on with a file of which so many bytes were written."""
        return num_bytes

    def remove_file(self, path: epath.Path) -> None:
        """Removes a file; does nothing if there is none."""
        with opened(path.parent) as folder, contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)

    def new_log(self, path: epath.Path) -> Log:
        """Returns a file that grows; its folder is created, but none above."""
        # Does not create the folder above: whoever removed it, or replaced it by a link, did so on
        # purpose.
        with contextlib.suppress(FileExistsError):
            os.mkdir(path.parent, 0o775)
        return Log(path)

    def record(self, path: epath.Path, **limits: int) -> AtomicRecord:
        """Returns a small file, in a folder that exists, which programs compete to replace.

        ``limits`` are those of ``AtomicRecord``: ``max_bytes`` and ``mode``.
        """
        return AtomicRecord(Path(path), **limits)

    def take_over(
        self, source: epath.Path, target: epath.Path, names: Collection[str] | None = None
    ) -> None:
        """Puts the files of a folder into another one, without writing their content.

        Takes all files at any depth, or those of these ``names``, whose folders must exist.
        """
        if names is None:
            link_folder(source, target)
        for name in names or ():
            link_file(source / name, target / name)

    def remove_retained(
        self, path: epath.Path, doomed: epath.Path, is_ours: IsOurs, fence: Fence
    ) -> None:
        """Removes a folder of links by way of ``doomed``, if there is one and it ``is_ours``."""
        if os.path.isdir(path) and not os.path.islink(path) and is_ours(path):
            fence()
            if doomed.exists():
                doomed.rmtree()
            path.rename(doomed)
            doomed.rmtree()

    def how_taken_over(self, folder: epath.Path) -> str:
        """Says in words how the files of such a folder are those of another."""
        if all(file.num_links == 1 for file in self.files(folder)):
            return "as copies, because this file system has no hard links"
        return (
            "as hard links. cp -r copies a linked file once for each step; cp -a, rsync -H and "
            "torchax-ckpt copy keep the links"
        )

    def wait_longer(self, step: str, problem: str) -> None:
        """Logs that all reads are slow; raises TimeoutError where it is of no use to wait longer.

        A disk may have to spin up, and nothing else can be done about it.
        """
        logger.warning("%s: %s. Still waiting: check the disk or the file server.", step, problem)

    def kvstore(self, folder: epath.Path) -> dict[str, Any]:
        """Returns the spec with which TensorStore opens a folder as a key-value store."""
        return {"driver": "file", "path": f"{location.without_backslash(os.fspath(folder))}/"}

    def database_to_read(self, folder: epath.Path) -> dict[str, Any]:
        """Returns TensorStore's spec of the OCDBT database in a folder, for reading."""
        return {"base": self.kvstore(folder)}

    def database_to_write(self, folder: epath.Path) -> dict[str, Any]:
        """Returns the parts of the spec of an OCDBT database that say where its files are."""
        base = self.kvstore(folder)
        # Nobody reads a data file before the index, so only the index is written by a rename.
        return {"base": {**base, "file_io_locking": {"mode": "non_atomic"}}, "manifest": base}

    # --- folders that are published whole ---

    @contextlib.contextmanager
    def draft(self, path: epath.Path) -> Iterator[Path]:
        """Yields the path on this host where a folder is prepared, and removes it at the end."""
        _remove(path)  # if that has failed before
        try:
            yield Path(path)
        finally:
            _remove(path)

    def remove_drafts(self, folder: epath.Path, names: re.Pattern[str]) -> None:
        """Removes what killed programs left in a folder; a failure is only logged."""
        for name in filter(names.fullmatch, os.listdir(folder)):
            _remove(folder / name)

    def complete_draft(self, draft: Path, before: epath.Path, reused: Sequence[str]) -> None:
        """Makes a prepared folder durable on this host, if it will be renamed.

        The folder that was put ``before`` has equal files of the names ``reused``, which are not
        stored again if the storage allows it.
        """
        for name in reused:
            file, link = before / name, Path(draft, f"{name}.link")
            with contextlib.suppress(OSError):  # this file system has no links, or no more of it
                if filecmp.cmp(file, draft / name, shallow=False):  # else it was damaged
                    os.link(file, link, follow_symlinks=False)
                    link.replace(draft / name)
        fsync.sync_tree(epath.Path(draft))

    def unused(self, folder: epath.Path, name: str, but: Collection[str] = ()) -> epath.Path:
        """Returns the path of this name, with a number if it exists or is in ``but``."""
        return first_free(folder, (name,), but=but)

    def put_folder(
        self, draft: Path, target: epath.Path, before: epath.Path, reused: Sequence[str], send: Send
    ) -> None:
        """Puts a complete draft at ``target``: at once, or by ``send``, which copies its files."""
        draft.rename(target)
        for folder in (target.parent, draft.parent):
            fsync.sync(folder)

    def remove_folder(self, path: epath.Path, doomed: epath.Path, sign: str) -> bool:
        """Deletes a folder, at once if it can be renamed to ``doomed``, or file by file.

        All folders that were put whole have a file ``sign``. One without it may be somebody else's,
        and stays; the answer is then False.
        """
        if is_ours := (path / sign).exists():
            _remove(doomed)
            path.rename(doomed)
            # Else a loss of power could leave the folder's name with a part of its files.
            for folder in (path.parent, doomed.parent):
                fsync.sync(folder)
            _remove(doomed)
        return is_ours or not path.exists()

    def replace_file(self, path: epath.Path, content: bytes, draft: epath.Path) -> None:
        """Replaces a small file: readers, and a loss of power, find the old content or the new.

        Raises Conflict if another program has replaced it meanwhile, and the storage can tell.
        """
        draft.unlink(missing_ok=True)
        permissions.write_file(Path(draft), content)
        fsync.swap_in(Path(draft), Path(path))

    # --- steps that are read ---

    def around(self, path: epath.Path) -> Iterator[epath.Path]:
        """Yields a path and the folders above it: a user may have given one inside of a step."""
        place = location.real(path)
        yield from (place, *place.parents)

    def has_run(self, folder: epath.Path, is_step: Callable[[epath.Path], bool]) -> bool:
        """Returns whether a folder is a run's directory, by few requests."""
        return folder.is_dir() and any(map(is_step, folder.iterdir()))

    def command_to_move(self, patterns: Sequence[str], new: str) -> str:
        """Returns the shell command that moves what has such names from the folder to ``new``."""
        sources = " ".join(f"{shlex.quote(str(self._folder))}/{each}" for each in patterns)
        return f"mkdir {shlex.quote(new)} && mv {sources} {shlex.quote(new)}/"

    def is_complete(self, step: epath.Path) -> bool:
        """Returns whether a folder with the name of a step is whole, if it was ever committed."""
        return True  # only a commit gives the name

    def was_committed(self, folder: epath.Path, parts: Collection[str]) -> bool:
        """Returns whether a folder was a step: it has a commit mark, or all ``parts`` of a step."""
        names = self.names_in(folder)
        return not names.isdisjoint({MARK, RECORD}) or names.issuperset(parts)

    def is_puzzling(self, folder: epath.Path) -> bool:
        """Returns whether a folder has the name of a step, but no save can have left it so."""
        if os.path.islink(folder):
            return True
        return any(folder.iterdir()) if folder.is_dir() else folder.exists()

    def require_contained(self, path: epath.Path, step: int) -> None:
        """Refuses a step that holds a link, a special file, or a file that is too large."""
        containment.require_contained(path, step)

    def pointer_in(self, path: epath.Path) -> str | None:
        """Returns the first file of a step that is a pointer of Git LFS; None without one."""
        return containment.pointer_in(path)

    # --- steps that are written ---

    def begin(self, step: int, token: str) -> epath.Path:
        """Returns the path at which a save by the holder of a lease's token writes a step."""
        # A unique name: no late write of a failed save or a stalled writer joins a later step.
        self._num_begun += 1
        return self._folder / f"writing-{step}-{token}-{self._num_begun}"

    def make_closed_folder(self, step: epath.Path) -> None:
        """Creates a step's folder, which other users cannot enter until ``finish``."""
        step.mkdir(mode=0o700)

    def make_inner_folder(self, path: epath.Path) -> None:
        """Creates a folder inside a step, and missing parents, unless they exist."""
        path.mkdir(parents=True, exist_ok=True)

    def finish(self, step: epath.Path, *, synced: str = "") -> None:
        """Lets other users enter a step's folder, and makes all of it durable but its name.

        Folders of the name ``synced`` are synced already.
        """
        permissions.open_folder(step)
        fsync.sync_tree(step, but=synced)

    def publish(self, step: int, written: epath.Path, fence: Fence) -> epath.Path:
        """Gives a written folder the name of a step; ``fence`` checks the lease before."""
        path = first_free(self._folder, (str(step), f"incoming-{step}"))
        fence()
        self._unkept[path] = written
        written.rename(path)
        fsync.sync(self._folder)
        return path

    def keep(self, path: epath.Path) -> None:
        """Notes that a published step is committed, so that nothing takes it back."""
        self._unkept.pop(path, None)

    def take_back(self, fence: Fence) -> None:
        """Undoes the publishing of steps that were not kept, so that readers no longer see them."""
        for path, written in list(self._unkept.items()):
            fence()
            if not os.path.lexists(written):  # else the folder did not get the other name
                with contextlib.suppress(FileNotFoundError):  # somebody has removed it
                    path.rename(written)
            fsync.sync(self._folder)  # before its files are removed
            del self._unkept[path]

    def let_go(self) -> None:
        """Forgets what is to be taken back: it is gone, or other programs may write there now."""
        self._unkept.clear()

    def final_path(self, path: epath.Path, step: int) -> epath.Path:
        """Returns the path that a published step gets once no other step has it."""
        return self._folder / str(step)

    def set_aside(self, path: epath.Path, target: epath.Path, fence: Fence) -> OSError | None:
        """Renames a step, so that it is a step no more; returns the error if the system refuses."""
        fence()
        try:
            path.rename(target)
        except FileNotFoundError:  # another process has removed it
            raise
        except OSError as error:
            return error
        return None

    def delete(self, path: epath.Path, step: int, fence: Fence) -> OSError | None:
        """Renames a step, then removes its files; returns the error if the system refuses."""
        if not path.exists():
            return None  # another process has removed it
        doomed = self.unused(self._folder, f"deleting-{step}")
        if refusal := self.set_aside(path, doomed, fence):
            return refusal
        fsync.sync(self._folder)  # else a loss of power could leave the name without the files
        _remove_tree(doomed)
        return None

    def remove_left(self, path: epath.Path, *, is_named_as_step: bool) -> None:
        """Removes what a killed or failed save left; its late requests may add to it meanwhile."""
        try:
            path.unlink() if os.path.islink(path) else _remove_tree(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise
            logger.debug("%s is still being written to: it will be removed later", path)


def _remove_tree(folder: epath.Path) -> None:
    permissions.empty_for_trash(folder)
    folder.rmtree()


def _remove(path: epath.Path) -> None:
    """Removes a file or folder that nothing names any more; a failure is only logged."""
    try:
        if path.is_dir() and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)


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
                "%s: cannot be linked from %s (%s). Frozen arrays are copied from step to step "
                "in place of links, which takes time and space. Use a file system with hard links, "
                "or CheckpointOptions(reuse=False)",
                os.fspath(target),
                os.fspath(source),
                error.strerror,
            )
        shutil.copyfile(source, target, follow_symlinks=False)
        fsync.sync(epath.Path(target))
