"""Creates files and folders that are never writable by everybody; refuses mounted buckets.

TensorStore creates files and folders with the modes that the umask allows. The umask belongs to the
whole process, so a save leaves it as it is, and writes its step in a folder that only the owner can
enter. Before the folder gets its final name, the save removes everybody's write permission (the
mode's ``o+w``) inside it, and gives it the mode of its inner folders, so that other users can enter
it if the umask allows this.

Buckets that are mounted with FUSE are refused: there the rename of a folder copies object by
object, there are no links, and no lock reaches another host. A killed save could leave half a step
under the name of a whole one, and a lease would exclude nobody. hf-mount is refused too: it also
serves a bucket by NFS, from this host, where files reach the bucket after they were synced, and the
last of two writers wins. Google Drive's mount uploads files later. A probe tells what other file
systems of FUSE lack, as gcsfuse in GKE, which does not say what it is; also NFS of this host.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import itertools
import os
import pathlib
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from typing import Any

from etils import epath

from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.runtime import user_messages
from torchax_ckpt.storage.medium import fsync, location

PROBE = "probe"
# The end of the names of files that a killed program may leave, and a later cleanup removes.
DRAFT_SUFFIX = ".draft"


def make_folder(path: epath.Path) -> None:
    """Creates a folder and missing parents, not writable by everybody; syncs the names of all."""
    for folder in reversed((path, *path.parents)):
        if not location.exists(folder):
            folder.mkdir(mode=0o775, exist_ok=True)
    # Also of parents that were there: whoever made them may not have synced them.
    real = pathlib.Path(os.path.realpath(path))
    device = real.stat().st_dev
    for parent in itertools.takewhile(lambda each: each.stat().st_dev == device, real.parents):
        # This user may be allowed to use the parent, but not to list it.
        with contextlib.suppress(PermissionError):
            fsync.sync(parent)


def write_file(path: pathlib.Path, content: bytes, mode: int = 0o664) -> None:
    """Creates a new file that is never writable by everybody; follows no link of this name."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content)


def prove_writable(folder: epath.Path) -> None:
    """Creates and removes a file; warns of a mount that lacks what commits and leases need."""
    # With a random name, under which nobody can have placed a link.
    path = pathlib.Path(folder / f"{PROBE}-{uuid.uuid4().hex}{DRAFT_SUFFIX}")
    write_file(path, b"")
    path.unlink()
    mount = _mount_of(folder)
    if mount is None:
        return
    if _is_drive(mount):
        user_messages.warn(
            f"{folder}: {mount.point} is Google Drive ({mount.kind}), which uploads files later. A "
            "step there survives the loss of this machine only once the mount was flushed (in "
            "Colab: drive.flush_and_unmount()). Drive's trash keeps deleted files for 30 days, and "
            "they count against the quota. So this library empties the files of a step before it "
            "deletes them. Another machine sees the lease late: let one program write there. "
            "gs://bucket/prefix has none of these limits."
        )
    elif _fuse_names(mount) or _is_served_here(mount):
        _probe(folder, mount)


def empty_for_trash(folder: epath.Path) -> None:
    """Empties the files of a folder on Google Drive, whose trash then keeps no bytes of them."""
    mount = _mount_of(folder)
    if mount is None or not _is_drive(mount):
        return
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it is deleted as it is
                file = os.open(os.path.join(place, name), flags)
                try:
                    if os.fstat(file).st_nlink <= 1:
                        os.ftruncate(file, 0)
                        os.fsync(file)  # else the mount may send the old content with the removal
                finally:
                    os.close(file)


def open_folder(step: epath.Path) -> None:
    """Lets other users enter a step's folder, as the modes of its inner folders say."""
    for folder, folders, files in os.walk(step):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            mode = stat.S_IMODE(os.lstat(path).st_mode)
            if mode & stat.S_IWOTH:
                os.chmod(path, mode & ~stat.S_IWOTH)
    # The inner folders have the mode that the umask or an access control list gives.
    with os.scandir(step) as entries:
        inner = next(entry for entry in entries if entry.is_dir())
        os.chmod(step, stat.S_IMODE(inner.stat().st_mode))


def require_own(place: epath.Path) -> None:
    """Raises DirectoryError if others may write a file that runs as code, or exchange it."""
    path = pathlib.Path(place)
    if not path.parent.is_dir():
        raise DirectoryError(f"there is no folder {path.parent}: mount its disk, or create it")
    mode = path.parent.stat().st_mode
    if mode & 0o022 and not mode & stat.S_ISVTX:
        raise DirectoryError(
            f"expected a folder in which others cannot exchange files, since what is in them "
            f"runs as code; found {path.parent} with {stat.filemode(mode)}: run chmod go-w"
        )
    with contextlib.suppress(FileNotFoundError):
        found, own = path.lstat(), os.geteuid()
        is_own = stat.S_ISREG(found.st_mode) and found.st_uid == own
        if not is_own or found.st_mode & 0o022:
            raise DirectoryError(
                f"expected a file that only user {own} may write, since what is in it runs as "
                f"code; found {stat.filemode(found.st_mode)} of user {found.st_uid}"
            )


_MOUNTINFO = pathlib.Path("/proc/self/mountinfo")
_LINE = re.compile(r"^(\S+) (\S+) \S+ (\S+) (\S+) .*? - (\S+) (\S*) (.*)$", re.M | re.A)
_ESCAPED = re.compile(r"\\([0-7]{3})")
# What mounts of FUSE are called, by their types after "fuse." or by their sources.
_OBJECT_STORES = {
    *("blobfuse", "blobfuse2", "cosfs", "gcsfuse", "geesefs", "goofys", "mount-s3"),
    *("mountpoint-s3", "obsfs", "ossfs", "ossfs2", "rclone", "s3fs", "tigrisfs"),
}
_ALL_BUCKETS = "gcsfuse"  # the source of a mount that has a folder for each bucket
_DRIVES = {"drive", "google-drive-ocamlfuse"}
_HF_MOUNT = "hf-mount"
_THIS_HOST = re.compile(r"(127\.[\d.]+|localhost|\[::1\]):/.*")


# A line of the file; ``root`` is the folder of the file system that is mounted at ``point``.
_Mount = collections.namedtuple("_Mount", "number parent root point kind source options")


def refuse_object_store(path: Any) -> None:
    """Raises DirectoryError if a path, which need not exist, lies on a mounted bucket."""
    mount = _mount_of(path)
    if mount is not None and _is_of_hf_mount(mount):
        raise DirectoryError(
            f"{path}: {mount.point} is a bucket mounted by hf-mount or the like ({mount.kind}, "
            f"source {mount.source}), which cannot be written safely: files reach the bucket after "
            "they were synced, and the last of two writers wins, so a lease excludes nobody. Give "
            "gs://bucket/prefix, or a path on another file system. "
            "CheckpointOptions(read_only=True) reads this one.",
            path=path,
        )
    if mount is None or _fuse_names(mount).isdisjoint(_OBJECT_STORES):
        return
    url = "gs://bucket/prefix"
    if mount.kind == "fuse.gcsfuse":
        bucket = "" if mount.source == _ALL_BUCKETS else mount.source
        names = bucket, mount.root, os.path.relpath(os.path.realpath(path), mount.point)
        url = f"gs://{os.path.normpath('/'.join(names)).strip('/')}"
    raise DirectoryError(
        f"{path}: {mount.point} is a bucket mounted with FUSE ({mount.kind}), which cannot be "
        "written safely: there a rename copies object by object, and a lease excludes nobody. Give "
        f"{url} (if the mount has --only-dir, with that folder after the bucket), or a path on "
        "another file system. CheckpointOptions(read_only=True) reads this one.",
        path=path,
    )


def _fuse_names(mount: _Mount) -> set[str]:
    kind, _, name = mount.kind.partition(".")
    return {name, mount.source} if kind == "fuse" else set()


def _is_of_hf_mount(mount: _Mount) -> bool:
    if _HF_MOUNT in _fuse_names(mount):
        return True
    # Its server exports one folder, without locks and by version 3 only. Helpers of cloud services
    # mount by version 4 from this host, and forward that to true servers of NFS.
    is_without_locks = {"vers=3", "local_lock=all"} <= set(mount.options.split(","))
    return is_without_locks and _is_served_here(mount) and mount.source.endswith(":/")


def _is_drive(mount: _Mount) -> bool:
    return not _fuse_names(mount).isdisjoint(_DRIVES)


def _is_served_here(mount: _Mount) -> bool:
    """Returns whether the server of a mount by NFS is a program of this host."""
    return mount.kind in ("nfs", "nfs4") and _THIS_HOST.fullmatch(mount.source) is not None


def _probe(folder: epath.Path, mount: _Mount) -> None:
    lacking: list[str] = []
    name = pathlib.Path(folder / f"{PROBE}-{uuid.uuid4().hex}")
    old, new = name.with_suffix(DRAFT_SUFFIX), name.with_suffix(f".renamed{DRAFT_SUFFIX}")
    file = old / "file"
    old.mkdir(mode=0o700)
    try:
        write_file(file, b"")
        number = file.stat().st_ino
        with _noted("it has no hard links", lacking):
            os.link(file, old / "link")
        with (
            _noted("it has no locks", lacking),
            open(file, "rb") as first,
            open(file, "rb") as second,
        ):
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lacking.append("its locks exclude nobody")
        with _noted("it cannot rename a folder with files", lacking):
            old.rename(new)
            if (new / "file").stat().st_ino != number:
                lacking.append("the rename of a folder makes new files")
    finally:
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(new, ignore_errors=True)
    if lacking:
        user_messages.warn(
            f"{folder}: expected a file system that commits and leases can rely on, found that of "
            f"{mount.point} (type {mount.kind}, source {mount.source}): {'; '.join(lacking)}. If "
            "it is a mounted bucket, give gs://bucket/prefix, else a path on another file system."
        )


@contextlib.contextmanager
def _noted(what: str, lacking: list[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        lacking.append(f"{what} ({error.strerror})")


def _mount_of(path: Any) -> _Mount | None:
    """Returns the mount in which a path lies; None where the kernel does not say."""
    try:
        text = os.fsdecode(_MOUNTINFO.read_bytes())
    except OSError:
        return None
    mounts = [
        _Mount(*(_ESCAPED.sub(lambda m: chr(int(m[1], 8)), field) for field in line))
        for line in _LINE.findall(text)
    ]
    numbers = {m.number for m in mounts}
    wanted = pathlib.PurePath(os.path.realpath(path))
    found = None
    # As the kernel walks a path: to the first mount point on the way, then within its last mount.
    inside = [m for m in mounts if m.parent not in numbers - {m.number}]
    while on_the_way := [m for m in inside if wanted.is_relative_to(m.point)]:
        found = min(reversed(on_the_way), key=lambda m: len(m.point))
        inside = [m for m in mounts if m.parent == found.number != m.number]
    return found
