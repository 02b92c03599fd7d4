"""Clients of buckets that do not wait long, and programs that are killed while they save to one."""

from __future__ import annotations

import asyncio
import types

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
