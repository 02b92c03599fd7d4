"""A disk that forgets what was not synced: a live view, and a view of what the medium has.

Bytes reach the medium when their file is synced, names when their folder is, in the order in which
they were changed. What was not synced at a cut of the power survives as chance has it.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import errno
import itertools
import os
import random
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fuse

# What is left at a cut of names, and of bytes, that were not synced.
NAMES = ("none", "all", "the first", "the first of each folder")
BYTES = ("none", "all", "the first", "zeros")

_STEP = re.compile(r"(incoming-)?\d+(-\d+)?")
# A mark that no promise rests on, so nothing waits for it: see committed_step.Verified.
_UNSYNCED_BY_DESIGN = {"verified"}
_numbers = itertools.count(1)
# The name of a link that says what the disk answers to a question: see ``ask``.
_QUESTION = ".power:"


@dataclasses.dataclass(eq=False)
class Node:
    """A file or a folder, and what the medium has of it."""

    mode: int  # kind and permissions
    data: bytearray = dataclasses.field(default_factory=bytearray)
    stored: bytes = b""
    names: dict[str, Node] = dataclasses.field(default_factory=dict)
    stored_names: dict[str, Node] = dataclasses.field(default_factory=dict)
    num_links: int = 0
    changed_ns: int = dataclasses.field(default_factory=time.time_ns)
    number: int = dataclasses.field(default_factory=lambda: next(_numbers))

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)

    def all(self) -> Iterator[Node]:
        """This and all nodes below that the medium reaches; those with two names twice."""
        yield self
        for below in self.stored_names.values():
            yield from below.all()

    def unsynced(self, path: str = "") -> Iterator[str]:
        """What the medium lacks."""
        if not self.is_folder and self.data != self.stored:
            yield path or "its bytes"
        for name, below in self.names.items():
            if name not in _UNSYNCED_BY_DESIGN:
                if self.stored_names.get(name) is not below:
                    yield f"the name {path}/{name}"
                yield from below.unsynced(f"{path}/{name}")


# One change of names, whole or not at all: folder, name, and node, or None where it goes.
Renaming = tuple[tuple[Node, str, Node | None], ...]


class Disk:
    """The file system; ``problems``: what was taken for durable that the medium did not have."""

    def __init__(self) -> None:
        self.root = Node(stat.S_IFDIR | 0o755)
        self._pending: list[Renaming] = []
        self.problems: list[str] = []
        self.num_audits = 0

    # --- names ---

    def at(self, path: str) -> Node:
        node = self.root
        for name in filter(None, path.split("/")):
            if not node.is_folder:
                raise OSError(errno.ENOTDIR, path)
            if name not in node.names:
                raise OSError(errno.ENOENT, path)
            node = node.names[name]
        return node

    def add(self, path: str, node: Node) -> Node:
        folder, name = self._parent(path)
        if name in folder.names:
            raise OSError(errno.EEXIST, path)
        self._change((folder, name, node))
        return node

    def remove(self, path: str) -> None:
        if self.at(path).names:
            raise OSError(errno.ENOTEMPTY, path)
        self._change((*self._parent(path), None))

    def rename(self, old: str, new: str) -> None:
        node, (source, before), (target, after) = self.at(old), self._parent(old), self._parent(new)
        replaced = target.names.get(after)
        if replaced is node:
            return
        if replaced is not None and replaced.is_folder:
            if not node.is_folder:
                raise OSError(errno.EISDIR, new)
            if replaced.names:
                raise OSError(errno.ENOTEMPTY, new)
        if after.startswith("deleting-"):
            self.audit(os.path.dirname(new), f"{old} is deleted", but=node)
        self._change((source, before, None), (target, after, node))

    def _parent(self, path: str) -> tuple[Node, str]:
        above, _, name = path.rpartition("/")
        return self.at(above), name

    def _change(self, *renaming: tuple[Node, str, Node | None]) -> None:
        self._pending.append(renaming)
        for folder, name, node in renaming:
            gone = folder.names.pop(name, None)
            if gone is not None:
                gone.num_links -= 1
            if node is not None:
                folder.names[name] = node
                node.num_links += 1
            folder.changed_ns = time.time_ns()

    # --- the medium ---

    def sync(self, node: Node) -> None:
        if not node.is_folder:
            node.stored = bytes(node.data)
            return
        concerned = [any(folder is node for folder, *_ in each) for each in self._pending]
        self._store(list(itertools.compress(self._pending, concerned)))
        left = zip(self._pending, concerned, strict=True)
        self._pending = [renaming for renaming, is_stored in left if not is_stored]

    def _store(self, renamings: list[Renaming]) -> None:
        for folder, name, node in itertools.chain.from_iterable(renamings):
            folder.stored_names.pop(name, None)
            if node is not None:
                folder.stored_names[name] = node

    def cut(self, choose: random.Random) -> str:
        """Cuts the power; returns what became of what was not synced."""
        names, kept = choose.choice(NAMES), set[int]()
        by_folder: dict[int, list[Renaming]] = collections.defaultdict(list)
        for renaming in self._pending:
            whole = names in ("all", "the first")
            by_folder[0 if whole else renaming[-1][0].number].append(renaming)
        for each in by_folder.values() if names != "none" else ():
            num = len(each) if names == "all" else choose.randint(0, len(each))
            kept |= {id(renaming) for renaming in each[:num]}
        self._store([renaming for renaming in self._pending if id(renaming) in kept])
        self._pending = []
        octets = choose.choice((*BYTES, "any"))
        for node in list(self.root.all()):
            if not node.is_folder and node.data != node.stored:
                how = octets if octets != "any" else choose.choice(BYTES)
                node.stored = _left(node, how, choose)
            node.num_links = 0
        for node in list(self.root.all()):
            node.data, node.names = bytearray(node.stored), dict(node.stored_names)
            for below in node.names.values():
                below.num_links += 1
        return f"names: {names}; bytes: {octets}"

    def audit(self, path: str, when: str, but: Node | None = None) -> None:
        """Notes what the medium lacks of a run's folder: a name above it, or a committed step."""
        self.num_audits += 1
        folder, above = self.at(path), self.root
        for name in filter(None, path.split("/")):
            if above.stored_names.get(name) is not above.names[name]:
                self.problems.append(f"{when}, but the medium lacks the name {name} of {path}")
            above = above.names[name]
        on_medium = {n: name for name, n in folder.stored_names.items() if _STEP.fullmatch(name)}
        for name, node in folder.names.items():
            if node is but or not (_STEP.fullmatch(name) or name == "run"):
                continue
            is_named = node in on_medium or folder.stored_names.get(name) is node
            lacking = [*([] if is_named else ["its name"]), *node.unsynced()]
            if lacking:
                self.problems.append(f"{when}, but of {name} the medium lacks {lacking[:4]}")


def _left(node: Node, how: str, choose: random.Random) -> bytes:
    if how == "all":
        return bytes(node.data)
    if how == "the first":
        written = node.data[: choose.randint(0, len(node.data))]
        return bytes(written) + node.stored[len(written) :]
    if how == "zeros":
        return node.stored + bytes(max(0, len(node.data) - len(node.stored)))
    return node.stored


# --- mounted -------------------------------------------------------------------------------------


def ask(mount: Path, what: str, about: str = "") -> str:
    """Asks the disk that is mounted: ``cut SEED``, ``audit FOLDER`` or ``problems``."""
    question = base64.urlsafe_b64encode(f"{what} {about}".encode()).decode()
    return os.readlink(mount / f"{_QUESTION}{question}")


class DiskOperations(fuse.Operations):
    """A disk as a file system, which also answers questions: see ``ask``."""

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
        times = dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), node.changed_ns)
        return {
            "st_mode": node.mode,
            "st_ino": node.number,
            "st_nlink": 2 if node.is_folder else node.num_links,
            "st_size": len(node.data),
            "st_blocks": -(-len(node.data) // 512),
            "st_uid": os.getuid(),
            "st_gid": os.getgid(),
            **times,
        }

    def readlink(self, path: str) -> str:
        question = base64.urlsafe_b64decode(path.removeprefix(f"/{_QUESTION}")).decode()
        what, _, about = question.partition(" ")
        disk = self._disk
        if what == "cut":
            return disk.cut(random.Random(int(about)))
        if what == "audit":
            disk.audit(about, f"{about}: a step was said to be durable")
            return "done"
        found, disk.problems = disk.problems, []
        return "\n".join([str(disk.num_audits), *found])[:4000]

    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
        node = self._disk.at(path)
        found = {".": node, "..": node, **node.names}  # the kernel skips what has no number
        return [(n, {"st_mode": e.mode, "st_ino": e.number}, 0) for n, e in found.items()]

    def statfs(self, path: str) -> dict[str, int]:
        counted = ("f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree")
        sizes = {"f_bsize": 4096, "f_frsize": 4096, "f_namemax": 255}
        return sizes | dict.fromkeys(counted, 1 << 22)

    def mkdir(self, path: str, mode: int) -> int:
        self._disk.add(path, Node(stat.S_IFDIR | mode))
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
        self._disk.add(path, Node(stat.S_IFREG | mode))
        return self.open(path, 0)

    def open(self, path: str, flags: int) -> int:
        node = self._disk.at(path)
        if flags & os.O_TRUNC:
            node.data.clear()
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
        node.data.extend(bytes(max(0, offset - len(node.data))))
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
