"""Fixtures for tests that use a bucket in their own process; see ``pytest_plugins`` there."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator

# Read when gcsfs is imported: it would ask a gRPC service that the emulator does not have.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

import gcs_proxy
import gcs_server
import pytest

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def _proxy() -> Iterator[gcs_proxy.FaultProxy]:
    """For the whole session: some clients read its address once in a process."""
    server = gcs_server.GcsServer()
    proxy = gcs_proxy.FaultProxy(server)
    yield proxy
    proxy.stop()
    server.stop()


@pytest.fixture(scope="module")
def _gcs(_proxy: gcs_proxy.FaultProxy) -> Iterator[gcs_proxy.FaultProxy]:
    before = {name: os.environ.get(name) for name in _proxy.environment()}
    os.environ.update(_proxy.environment())
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # every failure, with a traceback
    yield _proxy
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture
def gcs(_gcs: gcs_proxy.FaultProxy) -> Iterator[gcs_proxy.FaultProxy]:
    """The proxy, calm before and after each test."""
    _gcs.calm()
    _gcs.counts.clear()
    yield _gcs
    _gcs.calm()


@pytest.fixture
def bucket_run() -> str:
    """A prefix of its own in the bucket."""
    return f"gs://bucket/run{next(_numbers)}"
