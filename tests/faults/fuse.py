"""File systems of user space: the system's libfuse, through mfusepy."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starts import fork, wait_for

_missing = ""
try:
    import mfusepy
except (ImportError, OSError) as error:  # it loads libfuse
    _missing = str(error)
Operations: Any = object if _missing else mfusepy.Operations


def missing() -> str:
    """What this machine lacks to mount such a file system; "" if nothing."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened"
    if _missing:
        what = "mfusepy or the libfuse of the system is missing"
        return f"{what} ({_missing}): apt-get install libfuse3-3"
    return ""


@contextlib.contextmanager
def mounted(mount: Path, operations: Any, **options: Any) -> Iterator[None]:
    """Serves a file system in a process of its own."""
    # What a name stands for changes behind the kernel's back, so it remembers nothing.
    forgetful = dict.fromkeys(("entry_timeout", "negative_timeout", "attr_timeout"), 0)
    settings = {"foreground": True, "nothreads": True, **forgetful, **options}
    mount.mkdir()
    server = fork(lambda: mfusepy.FUSE(operations, str(mount), **settings) and None)
    try:
        assert wait_for(functools.partial(os.path.ismount, mount), server, 20), "no mount"
        yield
    finally:
        ctypes.CDLL(None).umount2(os.fsencode(mount), 2)  # MNT_DETACH
        os.waitpid(server, 0)
