"""Fixtures for tests that use a bucket in their own process; see ``pytest_plugins`` there."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import types
from collections.abc import Iterator
from unittest import mock

# Read when gcsfs is imported: it would ask a gRPC service that the emulator does not have.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

import gcsfs.retry
import pytest
from gcs_server import FaultyServer
from orbax.checkpoint._src.serialization import tensorstore_utils

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def _server() -> Iterator[FaultyServer]:
    """For the whole session: some clients read its address once in a process."""
    with contextlib.closing(FaultyServer()) as server:
        yield server


@pytest.fixture(scope="module")
def _gcs(_server: FaultyServer) -> Iterator[FaultyServer]:
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # every failure, with a traceback
    with mock.patch.dict(os.environ, _server.environment()):
        yield _server


@pytest.fixture
def gcs(_gcs: FaultyServer) -> Iterator[FaultyServer]:
    """The server, calm before and after each test."""
    _gcs.calm()
    _gcs.counts.clear()
    yield _gcs
    _gcs.calm()


@pytest.fixture
def independent(gcs: FaultyServer) -> Iterator[FaultyServer]:
    """The server with the objects in the second one, which the tests do not change."""
    with gcs.independent():
        yield gcs


@pytest.fixture
def url() -> str:
    """A prefix of its own in the bucket."""
    return f"gs://bucket/run{next(_numbers)}"


@pytest.fixture
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
