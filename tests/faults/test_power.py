"""The disk of ``torture_power.py``: what was synced is there after a cut, of the rest anything."""

from __future__ import annotations

import random
import stat

import pytest
from power_disk import Disk, Node

SEEDS = range(60)


def folder() -> Node:
    return Node(stat.S_IFDIR | 0o755)


def file(content: bytes) -> Node:
    return Node(stat.S_IFREG | 0o644, data=bytearray(content))


def cut(disk: Disk, seed: int) -> dict[str, bytes]:
    """The files of the folder ``run`` after a cut."""
    disk.cut(random.Random(seed))
    run = disk.root.names.get("run", folder())
    return {name: bytes(node.data) for name, node in run.names.items()}


@pytest.fixture
def disk() -> Disk:
    made = Disk()
    made.add("/run", folder())
    made.sync(made.root)
    return made


def test_what_was_synced_is_there_after_every_cut(disk: Disk) -> None:
    node = disk.add("/run/a", file(b"content"))
    disk.sync(node)
    disk.sync(disk.at("/run"))
    for seed in SEEDS:
        assert cut(disk, seed) == {"a": b"content"}


def found(synced: str) -> set[tuple[tuple[str, bytes], ...]]:
    """All that cuts leave of two files, of which something was synced."""
    results = set()
    for seed in SEEDS:
        disk = Disk()
        disk.add("/run", folder())
        disk.sync(disk.root)
        nodes = [disk.add(f"/run/{name}", file(b"12")) for name in "ab"]
        if synced == "names":
            disk.sync(disk.at("/run"))
        elif synced == "bytes":
            for node in nodes:
                disk.sync(node)
        results.add(tuple(sorted(cut(disk, seed).items())))
    return results


def test_of_names_that_were_not_synced_any_beginning_is_left() -> None:
    assert found("bytes") == {(), (("a", b"12"),), (("a", b"12"), ("b", b"12"))}


def test_of_bytes_that_were_not_synced_nothing_all_a_part_or_zeros_are_left() -> None:
    left = found("names")
    assert {len(names) for names in left} == {2}
    assert {content for names in left for _, content in names} == {b"", b"1", b"12", b"\0\0"}


def test_a_rename_is_left_whole_or_not_at_all(disk: Disk) -> None:
    disk.sync(disk.add("/run/old", file(b"1")))
    disk.sync(disk.at("/run"))
    seen = set()
    for seed in SEEDS:
        now = "old" if "old" in disk.at("/run").names else "new"
        disk.rename(f"/run/{now}", "/run/new" if now == "old" else "/run/old")
        seen.add(frozenset(cut(disk, seed)))
    assert seen == {frozenset({"old"}), frozenset({"new"})}


def test_an_overwritten_file_keeps_what_was_synced_of_it(disk: Disk) -> None:
    for seed in SEEDS:
        node = file(b"new!")
        node.stored = b"old"
        disk.root.names["run"].names.clear()
        disk.root.names["run"].stored_names.clear()
        disk.add("/run/a", node)
        disk.sync(disk.at("/run"))
        beginnings = {b"new!"[:n] + b"old"[n:] for n in range(5)}
        assert cut(disk, seed)["a"] in {*beginnings, b"old\0"}


@pytest.mark.parametrize("lacking", ["nothing", "bytes", "a name", "its name", "the run's name"])
def test_a_step_that_is_not_on_the_disk_is_noticed_when_another_is_deleted(
    lacking: str, disk: Disk
) -> None:
    step = disk.add("/run/2", folder())
    written = disk.add("/run/2/arrays", file(b"1"))
    disk.add("/run/1", folder())
    if lacking != "bytes":
        disk.sync(written)
    if lacking != "a name":
        disk.sync(step)
    if lacking != "its name":
        disk.sync(disk.at("/run"))
    if lacking == "the run's name":
        disk.add("/run/run", file(b""))
    disk.rename("/run/1", "/run/deleting-1")
    assert len(disk.problems) == (lacking != "nothing"), disk.problems
    assert disk.num_audits == 1
