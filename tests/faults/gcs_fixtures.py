"""Fixtures for tests that use a bucket in their own process; see ``pytest_plugins`` there."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from unittest import mock

# Read when gcsfs is imported: it would ask a gRPC service that the emulator does not have.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

import gcs_proxy
import gcs_server
import pytest
from gcs_proxy import FaultProxy

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def _proxy() -> Iterator[FaultProxy]:
    """For the whole session: some clients read its address once in a process."""
    with gcs_proxy.serving() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def _gcs(_proxy: FaultProxy) -> Iterator[FaultProxy]:
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # every failure, with a traceback
    with mock.patch.dict(os.environ, _proxy.environment()):
        yield _proxy


@pytest.fixture
def gcs(_gcs: FaultProxy) -> Iterator[FaultProxy]:
    """The proxy, calm before and after each test."""
    _gcs.calm()
    _gcs.counts.clear()
    yield _gcs
    _gcs.calm()


@pytest.fixture
def independent(gcs: FaultProxy) -> Iterator[FaultProxy]:
    """The proxy before the second server, which the tests do not change."""
    before, server = gcs.server, gcs_server.IndependentServer(gcs.url)
    gcs.server = server  # type: ignore[assignment]
    yield gcs
    gcs.server = before
    server.stop()


@pytest.fixture
def url() -> str:
    """A prefix of its own in the bucket."""
    return f"gs://bucket/run{next(_numbers)}"
