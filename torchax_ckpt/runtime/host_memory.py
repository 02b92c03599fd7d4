"""The host memory that this process may use: the machine's memory, within control-group limits.

In a container, the kernel ends a process whose control group uses more than its limit, however much
memory the machine has. The limit of a control group also applies to all groups inside it. So the
limit of a process is the smallest limit of its own group and the groups that enclose this group, as
far as they are mounted below ``/sys/fs/cgroup``.

Each call reads the limits anew, because limits can change, and because a process can be moved to
another group. This takes a fraction of a millisecond: call once per restore or save, not per leaf.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path

_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


@dataclasses.dataclass(frozen=True)
class _Interface:
    """The names of one version of control groups."""

    limit: str  # a group's file with the limit in bytes
    used: str  # the one with the usage
    reclaimable: str  # the key in ``memory.stat`` for the file cache that the kernel frees first


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
        match = re.search(
            r"^MemAvailable: *(\d+) kB",
            (_PROC / "meminfo").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        if match:
            available.append(int(match[1]) << 10)
    for folder, interface, limit in _limited_groups():
        used = _number(folder / interface.used)
        if used is not None:
            available.append(max(0, limit - max(0, used - _reclaimable(folder, interface))))
    return min(available, default=None)


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limited_groups() -> Iterator[tuple[Path, _Interface, int]]:
    """Yields folder, version and limit in bytes of this process's groups with limits.

    The limit file of a group without a limit contains ``max`` in version 2, and a number beyond any
    machine's memory in version 1.
    """
    machine = _machine_bytes()
    try:
        lines = (_PROC / "self" / "cgroup").read_text("utf-8", "replace").splitlines()
    except OSError:  # not Linux, or /proc is hidden
        return
    for line in lines:  # number:controllers:path; version 2 has number 0 and no controllers
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, interface = _CGROUP, _V2
        elif "memory" in controllers.split(","):
            top, interface = _CGROUP / "memory", _V1
        else:
            continue
        # In a container, the path may be the host's, and only the container's group is mounted, as
        # the top. Then the path does not exist.
        folder = top if ".." in path.split("/") else top / path.lstrip("/")
        for group in (folder, *folder.parents):
            limit = _number(group / interface.limit)
            if limit is not None and limit < machine:
                yield group, interface, limit
            if group == top:
                break


def _number(file: Path) -> int | None:
    """Returns the number in a file; None if the file is missing or has text such as ``max``."""
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _reclaimable(group: Path, interface: _Interface) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(" ")
            if key == interface.reclaimable:
                return int(value)
    return 0
