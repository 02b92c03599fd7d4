"""Real media that fail: small disks that can be filled and turned read-only.

One is a file system of its own, where this machine lets one be mounted. The other needs no rights:
the kernel's limit on file sizes stands for a full disk, and the modes of the folders, met as a
user without root's rights, for a read-only one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from pathlib import Path


class SmallDisk:
    """A file system of a few megabytes in memory, mounted at a folder."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        _mount("-t", "tmpfs", "-o", f"size={num_bytes},mode=755", "tmpfs", str(path))

    def fill(self) -> None:
        """Leaves no room at all."""
        with contextlib.suppress(OSError), open(self.path / "ballast", "wb", buffering=0) as file:
            for size in (1 << 16, 1 << 12):
                with contextlib.suppress(OSError):
                    while file.write(b"x" * size):
                        pass

    def leave(self, num_bytes: int) -> None:
        """Fills it, then leaves some room."""
        self.fill()
        os.truncate(self.path / "ballast", (self.path / "ballast").stat().st_size - num_bytes)

    def free(self) -> None:
        """Gives the room back."""
        (self.path / "ballast").unlink()

    def set_writable(self, is_writable: bool) -> None:
        """Mounts it anew, for reading or for writing."""
        _mount("-o", f"remount,{'rw' if is_writable else 'ro'}", str(self.path))


def _mount(*args: str) -> None:
    subprocess.run(["mount", *args], check=True, capture_output=True)


class LimitedDisk:
    """A folder on which this process can write little or nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)
        become_nobody()
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def leave(self, num_bytes: int) -> None:
        """Leaves some room for every file."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, self._limits[1]))

    def fill(self) -> None:
        """Leaves no room at all."""
        self.leave(0)

    def free(self) -> None:
        """Gives the room back."""
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)

    def set_writable(self, is_writable: bool) -> None:
        """Allows or forbids any change."""
        for folder in [*self.path.iterdir(), *self.path.glob("*/*")]:
            if folder.is_dir():
                folder.chmod(0o755 if is_writable else 0o555)


def mounting_prefix() -> list[str] | None:
    """What to put before a command so that it may mount; None where nothing helps.

    Its mounts are its own, and end with it.
    """
    for prefix in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        probe = [*prefix, "sh", "-c", "mount -t tmpfs tmpfs /mnt && umount /mnt"]
        if shutil.which(probe[0]) and subprocess.run(probe, capture_output=True).returncode == 0:
            return prefix
    return None


def become_nobody() -> None:
    """Gives up root's rights, which no permission stops."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
