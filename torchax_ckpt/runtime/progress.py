"""Progress bars for long work, shown only if standard error is a terminal."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

from torchax_ckpt.runtime.background import Flag

# Shorter work shows no bar.
_DELAY_SECS = 0.5
_REFRESH_SECS = 0.1


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
    """Shows a progress bar during the ``with`` block if standard error is a terminal.

    Args:
      label: names the work.
      total_bytes: returns the amount of work; called only if a bar is shown.

    Yields:
      A function to call with the bytes of each finished part, from any thread.
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
        lock = threading.Lock()  # tqdm's addition is not atomic

        def on_bytes(nbytes: int) -> None:
            with lock:
                shown.update(nbytes)

        yield on_bytes


def wait(ended: Flag, timeout_secs: float | None, stage: Callable[[], str]) -> None:
    """Waits for the end of work; shows its stage if standard error is a terminal.

    Args:
      ended: set at the end.
      timeout_secs: the longest time to wait; None waits without a limit.
      stage: returns the current stage of the work.
    """
    if not is_watched():
        ended.wait(timeout_secs)
        return
    deadline = math.inf if timeout_secs is None else time.monotonic() + timeout_secs
    ended.wait(_DELAY_SECS if timeout_secs is None else min(_DELAY_SECS, timeout_secs))
    with _Bar(bar_format="{desc}", leave=False, dynamic_ncols=True, file=sys.stderr) as shown:
        while not ended.is_set and time.monotonic() < deadline:
            shown.set_description_str(stage())
            ended.wait(_REFRESH_SECS)
