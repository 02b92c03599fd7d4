"""Fixtures for tests that use a bucket of S3 in their own process; see ``pytest_plugins`` there."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from unittest import mock

import pytest
from s3_server import FaultyS3

from torchax_ckpt.storage.medium.s3 import s3_medium

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[FaultyS3]:
    """For the whole session: the clients read its address once in a process."""
    with contextlib.closing(FaultyS3()) as server:
        yield server


@pytest.fixture
def s3(_s3_server: FaultyS3) -> Iterator[FaultyS3]:
    """The server, calm before and after each test."""
    _s3_server.calm()
    _s3_server.counts.clear()
    s3_medium._require_conditions.cache_clear()  # of the server behind this address
    with mock.patch.dict(os.environ, _s3_server.environment()):
        yield _s3_server
    _s3_server.calm()


@pytest.fixture
def ministack(s3: FaultyS3) -> Iterator[FaultyS3]:
    """The server with the objects in another one, which the tests do not change."""
    with s3.of("ministack"):
        yield s3


@pytest.fixture
def s3rver(s3: FaultyS3) -> Iterator[FaultyS3]:
    """The server with the objects in one that ignores every condition."""
    with s3.of("s3rver"):
        yield s3


@pytest.fixture
def s3_url() -> str:
    """A prefix of its own in the bucket."""
    return f"s3://bucket/run{next(_numbers)}"
