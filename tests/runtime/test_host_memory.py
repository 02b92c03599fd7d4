"""The memory that a process may use: the machine's, within the limits of its control groups."""

from __future__ import annotations

import contextlib
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.processes import Started

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.runtime import host_memory

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20
UNLIMITED_V1 = 9223372036854771712


class Layout:
    """A stand-in for ``/proc`` and mounted control groups, in a folder.

    Args:
      folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.cgroup_mounts = folder / "sys"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {MACHINE >> 11} kB\n")
        self.own("")
        (self.proc / "self" / "mountinfo").write_text("22 1 254:0 / / rw - ext4 /dev/vda rw\n")

    def own(self, lines: str) -> None:
        """What ``/proc/self/cgroup`` says."""
        (self.proc / "self" / "cgroup").write_text(textwrap.dedent(lines))

    def mount(self, name: str, root: str, kind: str, options: str = "rw") -> Path:
        """Mounts ``root`` of a hierarchy under a name; returns the mount point."""
        folder = self.cgroup_mounts / name
        folder.mkdir(parents=True)
        point = str(folder).replace(" ", "\\040")
        with open(self.proc / "self" / "mountinfo", "a") as file:
            file.write(f"32 31 0:29 {root} {point} rw,relatime shared:5 - {kind} cg {options}\n")
        return folder

    def v1(self, name: str = "memory", root: str = "/") -> Path:
        """Mounts version 1 with its memory controller."""
        return self.mount(name, root, "cgroup", "rw,memory")

    def v2(self, name: str = "unified", root: str = "/") -> Path:
        """Mounts version 2."""
        return self.mount(name, root, "cgroup2")


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    found = Layout(tmp_path / "a folder")  # a space is escaped in mountinfo
    monkeypatch.setattr(host_memory, "_PROC", found.proc)
    return found


def group_v1(folder: Path, limit: int, used: int = 0, inactive_file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    stat = f"cache 5\ninactive_file 7\ntotal_inactive_file {inactive_file}\n"
    (folder / "memory.stat").write_text(stat)


def group_v2(folder: Path, limit: int | str, used: int = 0, inactive_file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\nactive_file 9\n")


def test_without_control_groups_the_machine_counts(layout: Layout) -> None:
    assert host_memory.host_memory_bytes() == MACHINE
    assert host_memory.available_host_bytes() == MACHINE >> 11 << 10
    for file in ("self/cgroup", "self/mountinfo", "meminfo"):
        (layout.proc / file).unlink()
    assert host_memory.host_memory_bytes() == MACHINE
    assert host_memory.available_host_bytes() is None


def test_on_this_machine_both_are_known() -> None:
    available = host_memory.available_host_bytes()
    assert available is not None
    assert MIB < available <= host_memory.host_memory_bytes() <= MACHINE


def test_the_limit_of_version_1_counts_and_what_is_used_of_it(layout: Layout) -> None:
    layout.own("4:memory:/job\n3:cpu,cpuacct:/\n0::/\n")
    group_v1(layout.v1() / "job", 512 * MIB, used=400 * MIB, inactive_file=100 * MIB)
    assert host_memory.host_memory_bytes() == 512 * MIB
    assert host_memory.available_host_bytes() == 212 * MIB


def test_the_limit_of_version_2_counts_and_what_is_used_of_it(layout: Layout) -> None:
    layout.own("0::/job\n")
    group_v2(layout.v2() / "job", 512 * MIB, used=400 * MIB, inactive_file=100 * MIB)
    assert host_memory.host_memory_bytes() == 512 * MIB
    assert host_memory.available_host_bytes() == 212 * MIB


def test_a_group_that_uses_more_than_its_limit_has_nothing_left(layout: Layout) -> None:
    layout.own("0::/job\n")
    group_v2(layout.v2() / "job", 512 * MIB, used=600 * MIB)
    assert host_memory.available_host_bytes() == 0


@pytest.mark.parametrize("smallest", ["own", "middle", "top"])
def test_the_smallest_limit_on_the_path_to_the_root_counts(layout: Layout, smallest: str) -> None:
    layout.own("0::/kubepods/pod/job\n")
    top = layout.v2()
    limits = {"own": 900 * MIB, "middle": 800 * MIB, "top": 850 * MIB} | {smallest: 600 * MIB}
    group_v2(top / "kubepods/pod/job", limits["own"])
    group_v2(top / "kubepods/pod", limits["middle"])
    group_v2(top / "kubepods", limits["top"])
    group_v2(top / "other", 5 * MIB)
    group_v2(top / "kubepods/pod/job/below", 5 * MIB)
    group_v2(top.parent, 5 * MIB)  # outside of the mount
    assert host_memory.host_memory_bytes() == 600 * MIB


def test_what_is_left_is_the_least_of_any_group_on_the_path(layout: Layout) -> None:
    layout.own("0::/pod/job\n")
    top = layout.v2()
    group_v2(top / "pod/job", 500 * MIB, used=100 * MIB)
    group_v2(top / "pod", 900 * MIB, used=700 * MIB)  # others in the pod have taken the rest
    assert host_memory.host_memory_bytes() == 500 * MIB
    assert host_memory.available_host_bytes() == 200 * MIB


def test_limits_that_were_never_set_are_none(layout: Layout) -> None:
    layout.own("4:memory:/job\n0::/job\n")
    group_v1(layout.v1() / "job", UNLIMITED_V1, used=MIB)
    group_v2(layout.v2() / "job", "max", used=MIB)
    assert host_memory.host_memory_bytes() == MACHINE
    assert host_memory.available_host_bytes() == MACHINE >> 11 << 10


def test_a_limit_beyond_the_machine_is_none(layout: Layout) -> None:
    layout.own("0::/job\n")
    group_v2(layout.v2() / "job", 2 * MACHINE, used=2 * MACHINE)
    assert host_memory.host_memory_bytes() == MACHINE
    assert host_memory.available_host_bytes() == MACHINE >> 11 << 10


def test_in_a_hybrid_layout_the_hierarchy_with_the_memory_controller_counts(layout: Layout) -> None:
    layout.own(
        """\
        12:cpu,cpuacct:/job
        4:memory:/job
        1:name=systemd:/job
        0::/system.slice/job
        """
    )
    layout.mount("cpu", "/", "cgroup", "rw,cpu,cpuacct")
    group_v1(layout.v1() / "job", 700 * MIB)
    (layout.v2() / "system.slice/job").mkdir(parents=True)  # has no files of memory
    assert host_memory.host_memory_bytes() == 700 * MIB


def test_controllers_may_share_a_hierarchy(layout: Layout) -> None:
    layout.own("4:cpuset,memory:/job\n")
    folder = layout.mount("both", "/", "cgroup", "rw,cpuset,memory")
    group_v1(folder / "job", 700 * MIB)
    assert host_memory.host_memory_bytes() == 700 * MIB


def test_in_a_container_the_mount_may_begin_at_its_own_group(layout: Layout) -> None:
    layout.own("4:memory:/docker/c0ffee/job\n")
    group_v1(top := layout.v1(root="/docker/c0ffee"), 700 * MIB)
    group_v1(top / "job", 900 * MIB)
    assert host_memory.host_memory_bytes() == 700 * MIB


def test_in_a_namespace_the_mount_is_the_own_group(layout: Layout) -> None:
    layout.own("0::/\n")
    group_v2(layout.v2(), 700 * MIB)
    assert host_memory.host_memory_bytes() == 700 * MIB


@pytest.mark.parametrize("own", ["/../elsewhere", "/docker/other"])
def test_of_a_group_outside_of_what_is_mounted_the_top_counts(layout: Layout, own: str) -> None:
    layout.own(f"0::{own}\n")
    root = "/" if own.startswith("/..") else "/docker/c0ffee"
    group_v2(layout.v2(root=root), 700 * MIB)
    assert host_memory.host_memory_bytes() == 700 * MIB


def test_a_mount_of_another_group_does_not_count(layout: Layout) -> None:
    layout.own("0::/job\n")
    group_v2(layout.v2("other", root="/other"), 5 * MIB)
    group_v2(layout.v2() / "job", 700 * MIB)
    assert host_memory.host_memory_bytes() == 700 * MIB


def test_files_that_say_nothing_are_no_limit(layout: Layout) -> None:
    layout.own("0::/job\n")
    group_v2(top := layout.v2(), "")
    group_v2(top / "job", 512 * MIB)
    (top / "job" / "memory.stat").unlink()
    (top / "job" / "memory.current").write_text(f"{100 * MIB}\n")
    assert host_memory.host_memory_bytes() == 512 * MIB
    assert host_memory.available_host_bytes() == 412 * MIB


def test_a_limit_that_changes_is_noticed(layout: Layout) -> None:
    layout.own("0::/job\n")
    group_v2(folder := layout.v2() / "job", 512 * MIB)
    assert host_memory.host_memory_bytes() == 512 * MIB
    group_v2(folder, 256 * MIB)
    assert host_memory.host_memory_bytes() == 256 * MIB


# --- a real limit --------------------------------------------------------------------------------

LIMIT = 768 * MIB


@contextlib.contextmanager
def real_group() -> Iterator[Path | None]:
    """A group below this process's own that limits memory; None where none can be made.

    Of version 2 only a group without processes, or the root, may hand its memory controller down.
    """
    made = None
    for _, folder, interface in host_memory._groups():
        group = folder / f"torchax-ckpt-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / interface.limit).write_text(str(LIMIT))
        except OSError:  # without a memory controller
            group.rmdir()
            continue
        made = group
        break
    try:
        yield made
    finally:
        if made is not None:
            made.rmdir()


PROGRAM = """
import pathlib, sys
proc, group, directory = sys.argv[1:]
if group:
    (pathlib.Path(group) / "cgroup.procs").write_text("0")
from torchax_ckpt import TorchaxCheckpointer, errors
from torchax_ckpt.runtime import host_memory
host_memory._PROC = pathlib.Path(proc)
try:
    TorchaxCheckpointer(directory).load(1)
except errors.OutOfMemoryError as error:
    print(error)
"""


@pytest.mark.slow
def test_beyond_the_limit_a_load_is_refused_by_name_and_the_process_lives(tmp_path: Path) -> None:
    """In a real group where one can be made; else in one that is only written down."""
    layout = Layout(tmp_path / "layout")
    layout.own("0::/job\n")
    group_v2(layout.v2() / "job", LIMIT)
    # Compresses well, but not to less than any array can be compressed to.
    table = np.tile(np.random.default_rng(0).random(1 << 14), LIMIT // (120 << 10))
    assert LIMIT < table.nbytes < 2 * LIMIT
    directory = tmp_path / "run"
    options = CheckpointOptions(compression=True)
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        ckpt.save(1, state={"table": table}, force=True)
    with real_group() as group:
        proc = str(layout.proc) if group is None else "/proc"
        arguments = (proc, "" if group is None else str(group), str(directory))
        program = Started("-c", PROGRAM, *arguments, fresh=True, devices=1)
        result = program.result(120)
    assert result.returncode == 0, result.stderr
    assert f"can hold, {LIMIT} bytes, found {table.nbytes} bytes" in result.stdout
