"""File systems of user space: the system's libfuse, through mfusepy."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.waiting import wait_until

_missing = ""
try:
    import mfusepy
except (ImportError, OSError) as error:  # it loads libfuse
    _missing = str(error)
Operations: Any = object if _missing else mfusepy.Operations
_PR_SET_PDEATHSIG = 1


def missing() -> str:
    """What this machine lacks to mount such a file system; "" if nothing."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened"
    if _missing:
        what = "mfusepy or the libfuse of the system is missing"
        return f"{what} ({_missing}): apt-get install libfuse3-3"
    return ""


def fork(child: Callable[[], object]) -> int:
    """Calls a function in a process of its own, which ends with this one; returns its id."""
    assert len(os.listdir("/proc/self/task")) == 1, "forking is only sound before threads start"
    if pid := os.fork():
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        child()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def mounted(mount: Path, operations: Any, **options: Any) -> Iterator[None]:
    """Serves a file system in a process of its own."""
    # What a name stands for changes behind the kernel's back, so it remembers nothing.
    forgetful = dict.fromkeys(("entry_timeout", "negative_timeout", "attr_timeout"), 0)
    settings = {"foreground": True, "nothreads": True, **forgetful, **options}
    mount.mkdir()
    server = fork(lambda: mfusepy.FUSE(operations, str(mount), **settings))
    try:
        wait_until(lambda: os.path.ismount(mount), 20)
        yield
    finally:
        ctypes.CDLL(None).umount2(os.fsencode(mount), 2)  # MNT_DETACH
        os.waitpid(server, 0)
