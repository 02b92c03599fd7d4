"""Mounts a ``Disk`` with FUSE: libfuse of the system, through mfusepy."""

from __future__ import annotations

import base64
import ctypes
import errno
import os
import random
import stat
import time
from pathlib import Path
from typing import Any

from power_disk import Disk, Node

# The name of a link that says what the disk answers to a question: see ``ask``.
_QUESTION = ".power:"


def missing() -> str:
    """What this machine lacks to mount a file system of user space; "" if nothing."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened"
    try:
        import mfusepy  # noqa: F401 - loads libfuse
    except (ImportError, OSError) as error:
        return (
            f"mfusepy or the libfuse of the system is missing ({error}): apt-get install libfuse3-3"
        )
    return ""


def ask(mount: Path, what: str, about: str = "") -> str:
    """Asks the disk that is mounted: ``cut SEED``, ``audit FOLDER`` or ``problems``."""
    question = base64.urlsafe_b64encode(f"{what} {about}".encode()).decode()
    return os.readlink(mount / f"{_QUESTION}{question}")


def unmount(mount: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.umount2(os.fsencode(mount), 2)  # MNT_DETACH


def serve(mount: Path) -> None:
    """Mounts an empty disk, until it is unmounted."""
    import mfusepy

    class Operations(mfusepy.Operations):
        use_ns = True

        def __init__(self) -> None:
            self._disk = Disk()
            self._open: dict[int, Node] = {}

        def _node(self, path: str | None, handle: int | None) -> Node:
            if handle:
                return self._open[handle]
            assert path is not None
            return self._disk.at(path)

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            if path is not None and path.startswith(f"/{_QUESTION}"):
                return {"st_mode": stat.S_IFLNK | 0o777, "st_nlink": 1}
            node = self._node(path, fh)
            size = len(node.target) if node.target else len(node.data)
            times = dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), node.changed_ns)
            return {
                "st_mode": node.mode,
                "st_ino": node.number,
                "st_nlink": 2 if node.is_folder else node.num_links,
                "st_size": size,
                "st_blocks": -(-size // 512),
                "st_uid": os.getuid(),
                "st_gid": os.getgid(),
                **times,
            }

        def readlink(self, path: str) -> str:
            if not path.startswith(f"/{_QUESTION}"):
                return self._disk.at(path).target
            question = base64.urlsafe_b64decode(path.removeprefix(f"/{_QUESTION}")).decode()
            what, _, about = question.partition(" ")
            disk = self._disk
            if what == "cut":
                return disk.cut(random.Random(int(about)))
            if what == "audit":
                disk.audit(disk.at(about), f"{about}: a step was said to be durable")
                return "done"
            found, disk.problems = disk.problems, []
            return "\n".join([str(disk.num_audits), *found])[:4000]

        def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
            node = self._disk.at(path)
            found = {".": node, "..": node, **node.names}  # the kernel skips what has no number
            return [(n, {"st_mode": e.mode, "st_ino": e.number}, 0) for n, e in found.items()]

        def statfs(self, path: str) -> dict[str, int]:
            free = 1 << 22
            return (
                {"f_bsize": 4096, "f_frsize": 4096}
                | dict.fromkeys(("f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree"), free)
                | {"f_namemax": 255}
            )

        def mkdir(self, path: str, mode: int) -> int:
            self._disk.add(path, Node(stat.S_IFDIR | mode))
            return 0

        def symlink(self, target: str, source: str) -> int:
            self._disk.add(target, Node(stat.S_IFLNK | 0o777, target=source))
            return 0

        def link(self, target: str, source: str) -> int:
            self._disk.add(target, self._disk.at(source))
            return 0

        def unlink(self, path: str) -> int:
            self._disk.remove(path)
            return 0

        rmdir = unlink

        def rename(self, old: str, new: str) -> int:
            self._disk.rename(old, new)
            return 0

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            return self._opened(self._disk.add(path, Node(stat.S_IFREG | mode)))

        def open(self, path: str, flags: int) -> int:
            node = self._disk.at(path)
            if flags & os.O_TRUNC:
                node.data.clear()
            return self._opened(node)

        def _opened(self, node: Node) -> int:
            handle = max(self._open, default=0) + 1
            self._open[handle] = node
            return handle

        def release(self, path: str, fh: int) -> int:
            del self._open[fh]
            return 0

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return bytes(self._node(path, fh).data[offset : offset + size])

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            node = self._node(path, fh)
            if len(node.data) < offset:
                node.data.extend(bytes(offset - len(node.data)))
            node.data[offset : offset + len(data)] = data
            node.changed_ns = time.time_ns()
            return len(data)

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            node = self._node(path, fh)
            del node.data[length:]
            node.data.extend(bytes(length - len(node.data)))
            node.changed_ns = time.time_ns()
            return 0

        def chmod(self, path: str, mode: int) -> int:
            node = self._disk.at(path)
            node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(mode)
            return 0

        def chown(self, path: str, uid: int, gid: int) -> int:
            return 0

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            self._disk.at(path).changed_ns = times[1] if times else time.time_ns()
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            self._disk.sync(self._node(path, fh))
            return 0

        def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
            self._disk.sync(self._disk.at(path))
            return 0

        def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
            raise OSError(errno.ENOTSUP, name)

    # What a name stands for changes at a cut behind the kernel's back, so it remembers nothing.
    mfusepy.FUSE(
        Operations(),
        str(mount),
        foreground=True,
        nothreads=True,
        use_ino=True,
        entry_timeout=0,
        negative_timeout=0,
        attr_timeout=0,
        fsname="power",
    )
