"""A disk that forgets what was not synced: a live view, and a view of what the medium has.

Bytes reach the medium when their file is synced, names when their folder is, in the order in which
they were changed. What was not synced at a cut of the power survives as chance has it.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import itertools
import random
import re
import stat
import time
from collections.abc import Iterator

# What is left at a cut of names, and of bytes, that were not synced.
NAMES = ("none", "all", "the first", "the first of each folder")
BYTES = ("none", "all", "the first", "zeros")

_STEP = re.compile(r"(incoming-)?\d+(-\d+)?")
# A mark that no promise rests on, so nothing waits for it: see storage/directory/verified.py.
_UNSYNCED_BY_DESIGN = {"verified"}
_numbers = itertools.count(1)


@dataclasses.dataclass(eq=False)
class Node:
    """A file, a folder or a link.

    Attributes:
      mode: kind and permissions.
      data, stored: a file's bytes, and those on the medium.
      names, stored_names: a folder's entries, and those on the medium.
      target: of a link.
    """

    mode: int
    data: bytearray = dataclasses.field(default_factory=bytearray)
    stored: bytes = b""
    names: dict[str, Node] = dataclasses.field(default_factory=dict)
    stored_names: dict[str, Node] = dataclasses.field(default_factory=dict)
    target: str = ""
    num_links: int = 0
    changed_ns: int = dataclasses.field(default_factory=time.time_ns)
    number: int = dataclasses.field(default_factory=lambda: next(_numbers))

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)


@dataclasses.dataclass(frozen=True, eq=False)
class Renaming:
    """One change of names, whole or not at all: (folder, name, node, or None where it goes)."""

    changes: tuple[tuple[Node, str, Node | None], ...]

    def reach_medium(self) -> None:
        for folder, name, node in self.changes:
            if node is None:
                folder.stored_names.pop(name, None)
            else:
                folder.stored_names[name] = node


class Disk:
    """The file system.

    Attributes:
      problems: where a program took for durable, or deleted for, what the medium did not have.
      num_audits: how often that was looked at.
    """

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
        node = self.at(path)
        if node.names:
            raise OSError(errno.ENOTEMPTY, path)
        folder, name = self._parent(path)
        self._change((folder, name, None))

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
            self.audit(target, f"{old} is deleted", but=node)
        self._change((source, before, None), (target, after, node))

    def _parent(self, path: str) -> tuple[Node, str]:
        above, _, name = path.rpartition("/")
        return self.at(above), name

    def _change(self, *changes: tuple[Node, str, Node | None]) -> None:
        self._pending.append(Renaming(changes))
        for folder, name, node in changes:
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
        left = []
        for renaming in self._pending:
            if any(folder is node for folder, *_ in renaming.changes):
                renaming.reach_medium()
            else:
                left.append(renaming)
        self._pending = left

    def cut(self, choose: random.Random) -> str:
        """Cuts the power; returns what became of what was not synced."""
        names = choose.choice(NAMES)
        kept = self._pending if names == "all" else []
        if names == "the first":
            kept = self._pending[: choose.randint(0, len(self._pending))]
        elif names == "the first of each folder":
            by_folder: dict[int, list[Renaming]] = collections.defaultdict(list)
            for renaming in self._pending:
                by_folder[renaming.changes[-1][0].number].append(renaming)
            chosen = {
                id(renaming)
                for each in by_folder.values()
                for renaming in each[: choose.randint(0, len(each))]
            }
            kept = [renaming for renaming in self._pending if id(renaming) in chosen]
        for renaming in kept:
            renaming.reach_medium()
        self._pending = []
        octets = choose.choice((*BYTES, "any"))
        for node in list(_all(self.root)):
            if not node.is_folder and node.data != node.stored:
                node.stored = _left(
                    node, octets if octets != "any" else choose.choice(BYTES), choose
                )
            node.num_links = 0
        for node in list(_all(self.root)):
            node.data = bytearray(node.stored)
            node.names = dict(node.stored_names)
            for below in node.names.values():
                below.num_links += 1
        return f"names: {names}; bytes: {octets}"

    # --- what should be there ---

    def audit(self, folder: Node, when: str, but: Node | None = None) -> None:
        """Notes each committed step of a run's folder, and its name, that the medium lacks."""
        self.num_audits += 1
        on_medium = {n: name for name, n in folder.stored_names.items() if _STEP.fullmatch(name)}
        for name, node in folder.names.items():
            if node is but or not (_STEP.fullmatch(name) or name == "run"):
                continue
            is_named = node in on_medium or folder.stored_names.get(name) is node
            lacking = [*([] if is_named else ["its name"]), *_unsynced(node)]
            if lacking:
                self.problems.append(f"{when}, but of {name} the medium lacks {lacking[:4]}")


def _all(node: Node) -> Iterator[Node]:
    """All nodes that the medium reaches; those with two names twice."""
    yield node
    for below in node.stored_names.values():
        yield from _all(below)


def _left(node: Node, how: str, choose: random.Random) -> bytes:
    if how == "all":
        return bytes(node.data)
    if how == "the first":
        written = node.data[: choose.randint(0, len(node.data))]
        return bytes(written) + node.stored[len(written) :]
    if how == "zeros":
        return node.stored + bytes(max(0, len(node.data) - len(node.stored)))
    return node.stored


def _unsynced(node: Node, path: str = "") -> Iterator[str]:
    if not node.is_folder:
        if node.data != node.stored:
            yield path or "its bytes"
        return
    for name, below in node.names.items():
        if name not in _UNSYNCED_BY_DESIGN:
            if node.stored_names.get(name) is not below:
                yield f"the name {path}/{name}"
            yield from _unsynced(below, f"{path}/{name}")
