"""Owns what a person at a terminal sees of work that takes long; in logs there is nothing of it."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

# What is done sooner needs no bar.
_DELAY_SECS = 0.5
_REFRESH_SECS = 0.1


class _Bar(tqdm):
    """A bar that leaves nothing behind, neither on the screen nor a thread."""

    monitor_interval = 0


def is_watched() -> bool:
    """Whether a person watches: standard error is a terminal."""
    try:
        return bool(sys.stderr.isatty())
    except Exception:  # none at all, closed, or an object of somebody's that only writes
        return False


@contextlib.contextmanager
def bar(label: str, total_bytes: Callable[[], int]) -> Iterator[Callable[[int], None]]:
    """A bar as long as a person watches.

    Args:
      label: what is being done.
      total_bytes: how much there is to do; asked only if there is somebody to tell.

    Yields:
      What to tell of each part that is done, in bytes; from any thread.
    """
    if not is_watched():
        yield lambda nbytes: None
        return
    with _Bar(
        desc=label,
        total=total_bytes(),
        unit="B",
        unit_scale=True,
        leave=False,
        delay=_DELAY_SECS,
        dynamic_ncols=True,
        file=sys.stderr,
    ) as shown:
        lock = threading.Lock()  # tqdm adds in two steps

        def on_bytes(nbytes: int) -> None:
            with lock:
                shown.update(nbytes)

        yield on_bytes


def join(thread: threading.Thread, timeout_secs: float | None, said: Callable[[], str]) -> None:
    """Waits for a thread; says what it is at as long as a person watches.

    Args:
      thread: what is waited for.
      timeout_secs: for how long at most; None for as long as it takes.
      said: what it is at.
    """
    if not is_watched():
        thread.join(timeout_secs)
        return
    deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
    thread.join(_DELAY_SECS if timeout_secs is None else min(_DELAY_SECS, timeout_secs))
    with _Bar(bar_format="{desc}", leave=False, dynamic_ncols=True, file=sys.stderr) as shown:
        while thread.is_alive() and (deadline is None or time.monotonic() < deadline):
            shown.set_description_str(said())
            thread.join(_REFRESH_SECS)
