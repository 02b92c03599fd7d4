"""Several processes on a bucket: saved together, killed, resumed bit for bit, read by others."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

# Read when gcsfs is imported: it would ask a gRPC service that the emulator does not have.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

import gcs_proxy
import gcs_server
import pytest
from support import PROGRAMS, slices
from support.processes import Running, run_processes


@pytest.fixture
def gcs() -> Iterator[gcs_proxy.FaultProxy]:
    server = gcs_server.GcsServer()
    proxy = gcs_proxy.FaultProxy(server)
    yield proxy
    proxy.stop()
    server.stop()


@pytest.mark.slow
def test_two_processes_on_a_bucket_resume_bit_for_bit_after_both_were_killed(
    gcs: gcs_proxy.FaultProxy,
) -> None:
    environment = gcs.environment()
    with Running(
        PROGRAMS / "killed_after_training.py", 2, "gs://bucket/run", "0", env=environment
    ) as running:
        assert running.wait() == [-signal.SIGKILL] * 2, running.output(0)[1][-3000:]
        before = [running.reports(index) for index in range(2)]
    assert [steps for _, steps in before] == [{"steps": [4]}] * 2
    resumed = run_processes(
        PROGRAMS / "resumed_then_warm_started.py", 2, "gs://bucket/run", "77", env=environment
    )
    for (found, after), (expected, _) in zip(resumed, before, strict=True):
        assert (found["whole"], found["own"]) == (expected["whole"], expected["own"])
        assert found["seen"] == expected["seen"][4:]
        assert after == {"verified": 7, "step": 7, "alike": True, "count": 10}


@pytest.mark.long
def test_after_the_loss_of_all_slices_the_run_goes_on_from_the_bucket(
    gcs: gcs_proxy.FaultProxy, tmp_path: Path
) -> None:
    environment, ramdisks = gcs.environment(), tmp_path / "ramdisks"
    slices.killed("gs://bucket/slices", ramdisks, 2, at=6, env=environment)
    shutil.rmtree(ramdisks)
    found = slices.resumed("gs://bucket/slices", ramdisks, 2, env=environment)
    assert [(report["start"], report["tier"]) for report in found] == [(4, "durable")] * 2
    slices.assert_ends_alike(found, slices.straight(tmp_path, 2))
