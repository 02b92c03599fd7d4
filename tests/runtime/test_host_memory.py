"""The memory that a process may use: the machine's, within the limits of its control groups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from torchax_ckpt.runtime import host_memory

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20
TOPS = {"v1": "memory", "v2": "", "cpu": "cpu"}  # where the hierarchies are mounted
LEFT = MACHINE >> 11 << 10  # as the stand-in for /proc says


class Layout:
    """A stand-in for ``/proc`` and mounted control groups, in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.cgroup = folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {MACHINE >> 11} kB\n")
        self.own_groups = self.proc / "self" / "cgroup"  # the file
        self.own_groups.write_text("")


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    found = Layout(tmp_path)
    monkeypatch.setattr(host_memory, "_PROC", found.proc)
    monkeypatch.setattr(host_memory, "_CGROUP", found.cgroup)
    return found


def group(kind: str, folder: Path, limit: int | str, used: int | str = 0, cached: int = 0) -> None:
    """Writes the files of memory of a group, in MiB; ``cached``: what the kernel can give up."""
    folder.mkdir(parents=True, exist_ok=True)
    said, taken = (v if isinstance(v, str) else str(v * MIB) for v in (limit, used))
    names = ("limit_in_bytes", "usage_in_bytes") if kind == "v1" else ("max", "current")
    for name, content in zip(names, (said, taken), strict=True):
        (folder / f"memory.{name}").write_text(f"{content}\n")
    inactive = f"total_inactive_file {cached * MIB}" if kind == "v1" else "active_file 9"
    below = 7 if kind == "v1" else cached * MIB
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {below}\n{inactive}\n")


def test_without_control_groups_the_machine_counts(layout: Layout) -> None:
    assert host_memory.host_memory_bytes() == MACHINE
    assert host_memory.available_host_bytes() == LEFT
    for file in ("self/cgroup", "meminfo"):
        (layout.proc / file).unlink()
    assert host_memory.host_memory_bytes() == MACHINE
    assert host_memory.available_host_bytes() is None


def test_on_this_machine_both_are_known() -> None:
    available = host_memory.available_host_bytes()
    assert available is not None
    assert MIB < available <= host_memory.host_memory_bytes() <= MACHINE


def on_a_path(smallest: int) -> list[Any]:
    """Three groups, of which one has the smallest limit, beside others that do not count."""
    paths = ["kubepods/pod/job", "kubepods/pod", "kubepods"]
    limits = [600 if i == smallest else 800 + i for i in range(3)]
    beside = [("v2", path, 5) for path in ("other", "kubepods/pod/job/below", "..")]
    return [*(("v2", *each) for each in zip(paths, limits, strict=True)), *beside]


TWICE = str(2 * MACHINE)
HYBRID = "12:cpu,cpuacct:/job\n4:memory:/job\n1:name=systemd:/job\n0::/system.slice/job\n"
UNLIMITED = [("v1", "job", "9223372036854771712", 1), ("v2", "job", "max", 1)]
OF_POD = [("v2", "pod/job", 500, 100), ("v2", "pod", 900, 700)]
MIXED = [("cpu", "job"), ("v1", "job", 700), ("v2", "system.slice/job")]
CONTAINER = [("v1", "", 700), ("cpu", "docker/c0ffee/job")]
# What /proc/self/cgroup says; the groups, each with its hierarchy; the memory of the host in MiB
# (None: the machine's), and what is left of it.
GROUPS: dict[str, tuple[str, list[Any], int | None, int | None]] = {
    "v1": ("4:memory:/job\n3:cpu:/\n0::/\n", [("v1", "job", 512, 400, 100)], 512, 212),
    "v2": ("0::/job\n", [("v2", "job", 512, 400, 100)], 512, 212),
    "more than the limit": ("0::/job\n", [("v2", "job", 512, 600)], 512, 0),
    "the group is smallest": ("0::/kubepods/pod/job\n", on_a_path(0), 600, None),
    "one above it is": ("0::/kubepods/pod/job\n", on_a_path(1), 600, None),
    "the top is": ("0::/kubepods/pod/job\n", on_a_path(2), 600, None),
    "others have taken the rest": ("0::/pod/job\n", OF_POD, 500, 200),
    "never set": ("4:memory:/job\n0::/job\n", UNLIMITED, None, None),
    "beyond the machine": ("0::/job\n", [("v2", "job", TWICE, TWICE)], None, None),
    "hybrid": (HYBRID, MIXED, 700, None),
    "shared": ("4:cpuset,memory:/job\n", [("v1", "job", 700)], 700, None),
    "a container": ("4:memory:/docker/c0ffee/job\n", CONTAINER, 700, None),
    "a namespace": ("0::/\n", [("v2", "", 700)], 700, None),
    "elsewhere": ("0::/../elsewhere\n", [("v2", "", 700)], 700, None),
    "not mounted": ("0::/docker/other\n", [("v2", "", 700)], 700, None),
}


@pytest.mark.parametrize("case", GROUPS)
def test_the_limits_of_control_groups_count(case: str, layout: Layout) -> None:
    own, groups, memory, left = GROUPS[case]
    layout.own_groups.write_text(own)
    for kind, path, *values in groups:
        folder = layout.cgroup / TOPS[kind] / path
        folder.mkdir(parents=True, exist_ok=True)
        if values:
            group(kind, folder, *values)
    assert host_memory.host_memory_bytes() == (MACHINE if memory is None else memory * MIB)
    if memory is None or left is not None:
        expected = LEFT if left is None else left * MIB
        assert host_memory.available_host_bytes() == expected


def test_empty_files_are_no_limit_and_a_change_is_noticed(layout: Layout) -> None:
    layout.own_groups.write_text("0::/job\n")
    top = layout.cgroup
    group("v2", top, "")
    group("v2", top / "job", 512)
    (top / "job" / "memory.stat").unlink()
    (top / "job" / "memory.current").write_text(f"{100 * MIB}\n")
    assert host_memory.host_memory_bytes() == 512 * MIB
    assert host_memory.available_host_bytes() == 412 * MIB
    group("v2", top / "job", 256)
    assert host_memory.host_memory_bytes() == 256 * MIB
