"""Waits for conditions."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(is_true: Callable[[], object], timeout_secs: float = 60) -> None:
    """Polls until ``is_true()`` is true; fails after the timeout."""
    deadline = time.monotonic() + timeout_secs
    while not is_true():
        assert time.monotonic() < deadline, f"not true after {timeout_secs} s"
        time.sleep(0.01)
