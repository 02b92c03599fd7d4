"""Memory of this host that the process may use: the machine's, within its control groups' limits.

In a container the kernel ends a process whose control group takes more than its limit, however
much memory the machine has. A group's limit holds for all groups below it as well, so the smallest
limit counts on the path from the process's own group to the root, as far as that path is mounted.

Limits can change, and a process can be moved to another group: they are read at each call. A call
takes a fraction of a millisecond; call it once per restore or save, not once per leaf or file.
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
    """Names of a version of control groups.

    Attributes:
      limit, used: files of a group, with numbers of bytes.
      reclaimable: key in a group's ``memory.stat``: file caches that the kernel gives up first.
    """

    limit: str
    used: str
    reclaimable: str


_V1 = _Interface("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Interface("memory.max", "memory.current", "inactive_file")


def host_memory_bytes() -> int:
    """The memory that this process could have at most, used or not."""
    return min([_machine_bytes(), *(limit for _, _, limit in _limited_groups())])


def available_host_bytes() -> int | None:
    """The memory that can be allocated now, file caches that the kernel would give up included.

    None where Linux says nothing about the machine and no group has a limit.
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
    """The groups that this process is in and that limit it to less than the machine has.

    Yields folder, version and limit in bytes. Where no limit was set, version 2 says ``max``, and
    version 1 names a number beyond any machine's memory.
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
    """The mounted top and this process's own group, of each hierarchy that may limit memory.

    There may be two: in a hybrid layout memory is limited by version 1, and version 2 is mounted
    beside it without a memory controller. Where the files of a version are missing, it has no
    limits.
    """
    try:
        own = (_PROC / "self" / "cgroup").read_text().splitlines()
        mounts = (_PROC / "self" / "mountinfo").read_text().splitlines()
    except OSError:  # not Linux, or hidden
        return
    for line in own:  # number:controllers:path, with neither number nor controllers in version 2
        _, controllers, path = line.split(":", 2)
        if not controllers:
            interface, places = _V2, _mounted(mounts, "cgroup2")
        elif "memory" in controllers.split(","):
            interface, places = _V1, _mounted(mounts, "cgroup", "memory")
        else:
            continue
        for root, top in places:
            # In a container the mount may begin at the container's own group.
            with contextlib.suppress(ValueError):
                below = PurePosixPath(path).relative_to(root)
                if ".." not in below.parts:
                    yield top, top / below, interface
                    break
        else:  # a group outside of what is mounted: the top, which is most likely the container's
            for _, top in places[:1]:
                yield top, top, interface


def _mounted(
    mounts: Sequence[str], kind: str, controller: str | None = None
) -> list[tuple[str, Path]]:
    """Where file systems of a kind are mounted: the folder in them that is, and the mount point.

    Args:
      mounts: lines of ``mountinfo``: ``36 35 98:0 /root /mount/point rw shared:1 - kind source
        options``, with octal escapes in paths.
      kind: of the file system.
      controller: must be among the options of the file system, if given.
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
    """The number in a file; None if there is none, as for no limit."""
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
