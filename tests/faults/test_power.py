"""The disk of ``fault_power.py``: what was synced is there after a cut, of the rest anything."""

from __future__ import annotations

import random
import stat

import pytest
from power_disk import Disk, Node

SEEDS = range(60)


def folder() -> Node:
    return Node(stat.S_IFDIR | 0o755)


def file(content: bytes, stored: bytes = b"") -> Node:
    return Node(stat.S_IFREG | 0o644, data=bytearray(content), stored=stored)


def left(synced: str, *contents: bytes, stored: bytes = b"") -> set[tuple[tuple[str, bytes], ...]]:
    """All that cuts leave of files ``a``, ``b``, ... of which ``synced`` was synced."""
    results = set()
    for seed in SEEDS:
        disk = Disk()
        disk.add("/run", folder())
        disk.sync(disk.root)
        for name, content in zip("ab", contents, strict=False):
            made = disk.add(f"/run/{name}", file(content, stored))
            if "bytes" in synced:
                disk.sync(made)
        if "names" in synced:
            disk.sync(disk.at("/run"))
        disk.cut(random.Random(seed))
        found = {name: bytes(node.data) for name, node in disk.at("/run").names.items()}
        results.add(tuple(sorted(found.items())))
    return results


def test_what_was_synced_is_there_after_every_cut_and_of_the_rest_anything() -> None:
    assert left("bytes, names", b"content") == {(("a", b"content"),)}
    both = ("a", b"12"), ("b", b"12")
    assert left("bytes", b"12", b"12") == {(), both[:1], both}  # any beginning of the names
    found = left("names", b"12", b"12")
    assert {len(names) for names in found} == {2}
    assert {content for names in found for _, content in names} == {b"", b"1", b"12", b"\0\0"}
    beginnings = {b"new!"[:n] + b"old"[n:] for n in range(5)}
    found = left("names", b"new!", stored=b"old")
    assert found <= {(("a", content),) for content in (*beginnings, b"old\0")}
    assert len(found) > 2


def test_a_rename_is_left_whole_or_not_at_all() -> None:
    disk, seen = Disk(), set()
    disk.add("/run", folder())
    disk.sync(disk.add("/run/old", file(b"1")))
    disk.sync(disk.root)
    disk.sync(disk.at("/run"))
    for seed in SEEDS:
        (now,) = disk.at("/run").names
        disk.rename(f"/run/{now}", "/run/new" if now == "old" else "/run/old")
        disk.cut(random.Random(seed))
        seen.add(frozenset(disk.at("/run").names))
    assert seen == {frozenset({"old"}), frozenset({"new"})}


@pytest.mark.parametrize(
    "lacking", ["nothing", "bytes", "a name", "its name", "the run's name", "a name above the run"]
)
def test_a_step_that_is_not_on_the_disk_is_noticed_when_another_is_deleted(lacking: str) -> None:
    disk = Disk()
    disk.add("/run", folder())
    step, written = disk.add("/run/2", folder()), disk.add("/run/2/arrays", file(b"1"))
    disk.add("/run/1", folder())
    synced = {
        "bytes": written,
        "a name": step,
        "its name": disk.at("/run"),
        "a name above the run": disk.root,
    }
    for what, node in synced.items():
        if what != lacking:
            disk.sync(node)
    if lacking == "the run's name":
        disk.add("/run/run", file(b""))
    disk.rename("/run/1", "/run/deleting-1")
    assert len(disk.problems) == (lacking != "nothing"), disk.problems
    assert disk.num_audits == 1
