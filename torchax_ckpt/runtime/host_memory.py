"""The host memory that this process may use: the machine's memory, within control-group limits.

In a container, the kernel ends a process whose control group uses more than its limit, however much
memory the machine has. The limit of a control group also applies to all groups inside it. So the
limit of a process is the smallest limit of its own group and the groups that enclose this group.
This module ignores groups that lie outside the mounted part of the control-group file system,
because the process cannot read their limits.

Each call of ``host_memory_bytes`` or ``available_host_bytes`` reads the limits anew, because limits
can change, and because a process can be moved to another group. Reading the limits takes a fraction
of a millisecond. So call these two functions once per restore or save, not once per leaf or file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

_PROC = Path("/proc")


@dataclasses.dataclass(frozen=True)
class _Interface:
    """File names and keys of one version of control groups.

    Attributes:
      limit, used: names of a group's files that hold the limit and the usage in bytes.
      reclaimable: key in a group's ``memory.stat`` for the file cache that the kernel frees first.
    """

    limit: str
    used: str
    reclaimable: str


_V1 = _Interface("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Interface("memory.max", "memory.current", "inactive_file")


def host_memory_bytes() -> int:
    """Returns the most bytes of memory that this process may use, including bytes in use now."""
    return min([_machine_bytes(), *(limit for _, _, limit in _limited_groups())])


def available_host_bytes() -> int | None:
    """Returns how many more bytes this process can allocate now, counting freeable caches.

    None if Linux gives no figure for the machine and no control group has a limit.
    """
    available = []
    with contextlib.suppress(OSError):
        found = re.search(
            r"^MemAvailable: *(\d+) kB", (_PROC / "meminfo").read_text(), re.MULTILINE
        )
        if found:
            available.append(int(found[1]) << 10)
    for folder, interface, limit in _limited_groups():
        used = _number(folder / interface.used)
        if used is not None:
            available.append(max(0, limit - max(0, used - _reclaimable(folder, interface))))
    return min(available, default=None)


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limited_groups() -> Iterator[tuple[Path, _Interface, int]]:
    """Yields this process's control group and its ancestors, if limited below the machine.

    Yields (folder, version, limit in bytes). The limit file of a group without a limit contains
    ``max`` in version 2, and a number beyond any machine's memory in version 1.
    """
    machine = _machine_bytes()
    for top, folder, interface in _groups():
        for group in (folder, *folder.parents):
            limit = _number(group / interface.limit)
            if limit is not None and limit < machine:
                yield group, interface, limit
            if group == top:
                break


def _groups() -> Iterator[tuple[Path, Path, _Interface]]:
    """Yields (mount point, folder of this process's group, version) of each hierarchy of groups.

    There may be two: in a hybrid layout, version 1 of control groups limits memory, and version 2
    is also mounted, but without a memory controller.
    """
    try:
        groups = (_PROC / "self" / "cgroup").read_text().splitlines()
        mounts = (_PROC / "self" / "mountinfo").read_text().splitlines()
    except OSError:  # not Linux, or /proc is hidden
        return
    for line in groups:  # number:controllers:path; version 2 has number 0 and no controllers
        _, controllers, path = line.split(":", 2)
        if not controllers:
            interface, places = _V2, _mounted(mounts, "cgroup2")
        elif "memory" in controllers.split(","):
            interface, places = _V1, _mounted(mounts, "cgroup", "memory")
        else:
            continue
        for root, top in places:
            # In a container, the mount may begin at the container's group.
            with contextlib.suppress(ValueError):
                below = PurePosixPath(path).relative_to(root)
                if ".." not in below.parts:
                    yield top, top / below, interface
                    break
        else:  # the group is not mounted: uses the mount point, most likely the container's group
            for _, top in places[:1]:
                yield top, top, interface


def _mounted(
    mounts: Sequence[str], kind: str, controller: str | None = None
) -> list[tuple[str, Path]]:
    """Returns (root, mount point) for each mount of a kind of file system, from ``mountinfo``.

    A line of it: ``36 35 98:0 /root /mount/point rw shared:1 - kind source options``, with octal
    escapes in paths. The root is the folder of the file system that appears at the mount point;
    ``controller`` is an option that the file system must have.
    """
    found = []
    for line in mounts:
        mount, _, file_system = line.partition(" - ")
        fields, described = mount.split(" "), file_system.split(" ")
        if len(fields) < 5 or described[0] != kind:
            continue
        if controller is None or controller in described[-1].split(","):
            found.append((_unescaped(fields[3]), Path(_unescaped(fields[4]))))
    return found


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _number(file: Path) -> int | None:
    """Returns the number in a file; None if the file is missing or has text such as ``max``."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(group: Path, interface: _Interface) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == interface.reclaimable:
                return int(value)
    return 0
