"""Shares compiled programs between tests, and between all processes that run tests or programs.

A test makes functions of its own, so that JAX compiles equal programs once for each test. A program
that tests start several times would compile everything each time. Make keeps the folder, so that a
later run finds it: what a test compiles on purpose must differ in each run.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache, compiler, lru_cache


def share(folder: Path) -> None:
    """Keeps what JAX compiles in this process in ``folder``, and takes it from there."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    lru_cache.LRUCache.put = _put  # type: ignore[method-assign,assignment]
    compiler._cache_write = _cache_write  # type: ignore[assignment]


def share_nothing() -> None:
    """Ends the sharing. What is compiled for devices that are not there cannot be taken again."""
    jax.config.update("jax_enable_compilation_cache", False)


def _put(cache: Any, key: str, value: bytes) -> None:
    """Writes an entry at once, so that no other process reads half of it, as JAX's own may."""
    with tempfile.NamedTemporaryFile(dir=cache.path, delete=False) as file:
        file.write(value)
    os.replace(file.name, cache.path / f"{key}{lru_cache._CACHE_SUFFIX}")


def _cache_write(
    key: str, secs: float, name: str, backend: Any, executable: Any, callbacks: Any = ()
) -> None:
    """Keeps what any process of a distributed program compiles; JAX's own keeps process 0's.

    The keys of processes differ. JAX passes the callbacks until 0.11.
    """
    if not callbacks:
        compilation_cache.put_executable_and_time(key, name, executable, backend, int(secs))
