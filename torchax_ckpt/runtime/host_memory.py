"""Owns how much memory this host has."""

from __future__ import annotations

import functools
import os


@functools.cache
def host_memory_bytes() -> int:
    """The memory of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
