"""The command line on a bucket: the commands, and the commit mark last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Read when gcsfs is imported: it would ask a gRPC service that the emulator does not have.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

import gcs_proxy
import gcs_server
import pytest
from support import PROGRAMS
from support.processes import run_python


@pytest.fixture
def gcs() -> Iterator[gcs_proxy.FaultProxy]:
    proxy = gcs_proxy.FaultProxy(gcs_server.GcsServer())
    yield proxy
    proxy.stop()
    proxy.server.stop()


@pytest.mark.long
@pytest.mark.slow
def test_commands_work_on_a_bucket(gcs: gcs_proxy.FaultProxy, tmp_path: Path) -> None:
    page = str(tmp_path / "report.html")
    places = ("gs://bucket/run", "gs://bucket/copy", page, str(tmp_path / "local"))
    run_python(PROGRAMS / "commands_on_bucket.py", *places, env=gcs.environment())
    assert len(gcs.server.names("run/events/")) == 2  # an object for each program
    assert not [name for name in gcs.server.names() if "lease" in name]
    assert not gcs.server.names("run/1/")
    assert "copy/2/commit_success.txt" in gcs.server.names()
