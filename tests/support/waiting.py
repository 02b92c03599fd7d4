"""Waiting until something is true."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(is_true: Callable[[], object], timeout_secs: float = 60) -> None:
    """Looks until it is true; fails if that takes too long."""
    deadline = time.monotonic() + timeout_secs
    while not is_true():
        assert time.monotonic() < deadline, f"not true after {timeout_secs} s"
        time.sleep(0.01)
