"""Progress bars for long work, shown only on a terminal; the pace of reads."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

from torchax_ckpt.runtime.background import Flag

# Shorter work shows no bar.
_DELAY_SECS = 0.5
_REFRESH_SECS = 0.1
_POLL_SECS = 0.5


class _Bar(tqdm):
    """A tqdm progress bar that does not start tqdm's monitor thread."""

    monitor_interval = 0


def is_watched() -> bool:
    """Returns whether standard error is a terminal."""
    try:
        return bool(sys.stderr.isatty())
    except Exception:  # stderr is None, closed, or an object that has only write()
        return False


@contextlib.contextmanager
def bar(label: str, total_bytes: Callable[[], int]) -> Iterator[Callable[[int], None]]:
    """Shows a bar during the block; yields a function that adds bytes to it, on any thread."""
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
        lock = threading.Lock()  # tqdm's addition is not atomic

        def on_bytes(nbytes: int) -> None:
            with lock:
                shown.update(nbytes)

        yield on_bytes


def wait(ended: Flag, left_secs: Callable[[], float], stage: Callable[[], str]) -> None:
    """Waits until ``ended`` is set, or no time is left; meanwhile shows the stage of the work.

    Asks ``left_secs`` again and again, because a SIGTERM may end the time early.
    """
    ended.wait(min(_DELAY_SECS, left_secs()))
    is_shown = is_watched() and not ended.is_set
    showing: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if is_shown:
        showing = _Bar(bar_format="{desc}", leave=False, dynamic_ncols=True, file=sys.stderr)
    with showing as shown:
        while not ended.is_set and (left := left_secs()) > 0:
            if is_shown:
                shown.set_description_str(stage())
            ended.wait(min(left, _REFRESH_SECS if is_shown else _POLL_SECS))


class Pace:
    """Detects that the reads of this process together are too slow while one of them waits.

    ``secs`` is how long this read has waited since they were last fast enough. Open requests count
    as if all their bytes had arrived, because it is not known how many have, and many requests may
    share a slow link.
    """

    _got_bytes = 0  # by all reads of this process
    _lock = threading.Lock()

    def __init__(self, min_bytes_per_sec: float, limit_secs: float) -> None:
        self._min_bytes_per_sec, self._limit_secs = min_bytes_per_sec, limit_secs
        self._open_bytes = 0
        self.restart()

    @property
    def bytes(self) -> int:
        """What all reads of this process got within ``secs``."""
        return Pace._got_bytes - self._before_bytes

    def restart(self) -> None:
        """Measures from now on."""
        self._before_bytes, self.secs = Pace._got_bytes, 0.0

    def add(self, asked_bytes: int, got_bytes: int = 0) -> None:
        """Counts a request of this read, or the answer to it."""
        with self._lock:
            self._open_bytes += asked_bytes - got_bytes
            Pace._got_bytes += got_bytes

    def wait(self, read: Any) -> bool:
        """Waits for a future; returns False if the reads are too slow before it is done."""
        while not read.done():
            began = time.monotonic()
            with contextlib.suppress(TimeoutError):
                read.exception(timeout=_POLL_SECS)
            # A process that was stopped has not waited all the time that has passed.
            self.secs += min(time.monotonic() - began, 2 * _POLL_SECS)
            expected = self._min_bytes_per_sec * self.secs
            if self.bytes >= expected:
                self.restart()
            elif self.secs >= self._limit_secs and self.bytes + self._open_bytes < expected:
                return bool(read.done())
        return True
