"""A model of Google Drive's mount in Colab, for tests of what a run does there.

A folder of this host stands for the mount. It has no hard links. What is written is there at once,
and is certain to be in Drive after a flush only. Deleted and replaced files are in a trash, with
the content that was synced last. Its bytes count against the quota, as do those of all files;
versions of a file that was overwritten do not count. Beyond the quota, only an empty file can be
synced.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import shutil
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from torchax_ckpt.storage.medium import permissions

Files = Mapping[Path, bytes]


class Drive:
    """The mount; ``emptied`` has the paths of files that were truncated there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.quota_bytes = math.inf
        self.trash_bytes = 0
        self.emptied: list[Path] = []
        self._uploaded: Files = {}
        self._synced_bytes: dict[int, int] = {}  # of files that were synced or truncated
        self._lock = threading.Lock()

    def files(self) -> Files:
        """What a program sees."""
        return {
            path.relative_to(self.folder): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file()
        }

    def flush(self) -> None:
        """Uploads everything, as ``drive.flush_and_unmount()`` does."""
        self._uploaded = self.files()

    def lose_machine(self, now: Files, chance: random.Random | None = None) -> None:
        """Leaves in the folder what Drive has: all that was flushed, of the rest what chance says.

        ``now`` is what the program saw at the end.
        """
        shutil.rmtree(self.folder)
        for name in sorted(now.keys() | self._uploaded.keys()):
            content = self._uploaded.get(name)
            if chance is not None and chance.random() < 0.5:
                # The emptying of a deleted file may arrive without its new name and its removal.
                content = now.get(name, chance.choice([None, b""]))
            if content is not None:
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).write_bytes(content)
        self.folder.mkdir(exist_ok=True)

    def used_bytes(self) -> int:
        used = 0
        for place, _, names in os.walk(self.folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # another thread has removed it
                    used += os.lstat(os.path.join(place, name)).st_size
        return used + self.trash_bytes

    def has(self, path: Any, folder: int | None = None) -> bool:
        above = os.getcwd() if folder is None else _path_of(folder)
        return Path(above, path).is_relative_to(self.folder)

    def take_to_trash(self, path: Any, folder: int | None = None) -> None:
        if self.has(path, folder):
            found = os.stat(path, dir_fd=folder, follow_symlinks=False)
            with self._lock:
                synced = self._synced_bytes.pop(found.st_ino, 0)
                self.trash_bytes += max(found.st_size, synced)

    def truncate(self, descriptor: int) -> None:
        """Notes that a file is emptied here, and not yet in Drive."""
        self.emptied.append(Path(_path_of(descriptor)).relative_to(self.folder))
        found = os.fstat(descriptor)
        self._synced_bytes.setdefault(found.st_ino, found.st_size)

    def sync(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        if found.st_size and self.used_bytes() > self.quota_bytes:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        self._synced_bytes[found.st_ino] = found.st_size


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drive:
    """An empty mount of the type that Colab's has."""
    mount = Drive(tmp_path / "drive")
    mount.folder.mkdir()
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 254:0 / / rw - ext4 /dev/vda rw\n"
        f"2 1 0:9 / {mount.folder} rw,nosuid,nodev,relatime - fuse.drive drive rw,user_id=0\n"
    )
    monkeypatch.setattr(permissions, "_MOUNTINFO", table)
    link, unlink, fsync, truncate = os.link, os.unlink, os.fsync, os.ftruncate
    renames = {name: getattr(os, name) for name in ("rename", "replace")}

    def refuse_link(source: Any, target: Any, **options: Any) -> None:
        if mount.has(target, options.get("dst_dir_fd")):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), os.fspath(target))
        link(source, target, **options)

    def to_trash(path: Any, *, dir_fd: int | None = None) -> None:
        mount.take_to_trash(path, dir_fd)
        unlink(path, dir_fd=dir_fd)

    def synced(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and mount.has(_path_of(descriptor)):
            mount.sync(descriptor)
        fsync(descriptor)

    def truncated(descriptor: int, length: int) -> None:
        if mount.has(_path_of(descriptor)):
            mount.truncate(descriptor)
        truncate(descriptor, length)

    def replacing(name: str) -> Any:
        def rename(source: Any, target: Any, **options: Any) -> None:
            if os.path.isfile(target):
                mount.take_to_trash(target)
            renames[name](source, target, **options)

        return rename

    monkeypatch.setattr(os, "link", refuse_link)
    monkeypatch.setattr(os, "unlink", to_trash)
    monkeypatch.setattr(os, "remove", to_trash)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "ftruncate", truncated)
    for name in renames:
        monkeypatch.setattr(os, name, replacing(name))
    return mount
