"""Clients of buckets that do not wait long, and programs that are killed while they save to one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gcsfs.retry
import pytest
from orbax.checkpoint._src.serialization import tensorstore_utils


def give_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the clients repeat a request for a second, where it takes them minutes otherwise."""

    async def sleep(secs: float) -> None:
        await asyncio.sleep(min(secs, 0.05))

    monkeypatch.setattr(gcsfs.retry, "asyncio", types.SimpleNamespace(sleep=sleep))
    retries = {"max_retries": 3, "initial_delay": "50ms", "max_delay": "50ms"}
    for context in (
        tensorstore_utils._BASE_TS_CONTEXT,
        tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT,
    ):
        monkeypatch.setitem(context, "gcs_request_retries", retries)


def killed_before_the_commit(
    gcs: Any, program: str, run: str, step: int, folders: Sequence[Path]
) -> None:
    """Runs a program that saves, and kills it when a step's arrays are there, but not its commit.

    The program may import from ``folders``; its argument is the run's directory.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), run],
        env={**os.environ, "PYTHONPATH": ":".join(map(str, folders)), "JAX_PLATFORMS": "cpu"},
    )

    def kill(request: str) -> None:
        if f"{step}%2Fstate%2Fmanifest.ocdbt&" in request:
            process.kill()

    gcs.hook = kill
    assert process.wait(timeout=100) == -9
    gcs.hook = None
