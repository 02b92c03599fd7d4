"""Several processes on a bucket: saved together, killed, resumed bit for bit, read by others."""

from __future__ import annotations

import json
import re
import shutil
import signal
import urllib.parse
from pathlib import Path
from typing import Any

import gcs_proxy
import jax
import numpy as np
import pytest
from etils import epath
from reuse_on_processes import mesh_of, state
from support import PROGRAMS, slices
from support.linked import by_orbax
from support.processes import Running, run_processes

from torchax_ckpt.storage.medium import bucket

pytest_plugins = ("gcs_fixtures",)
REUSE = PROGRAMS / "reuse_on_processes.py"


@pytest.mark.slow
def test_two_processes_on_a_bucket_resume_bit_for_bit_after_both_were_killed(
    gcs: gcs_proxy.FaultProxy, bucket_run: str
) -> None:
    environment = gcs.environment()
    do: Any = ["attach", ["train", 7], "wait", "steps", ["begin", 7], "die"]
    given = {"directory": bucket_run, "do": do}
    with Running(PROGRAMS / "group.py", 2, given, env=environment) as running:
        assert running.wait() == [-signal.SIGKILL] * 2, running.output(0)[1][-3000:]
        before = [running.reports(index) for index in range(2)]
    assert [end["steps"] for *_, end in before] == [[4]] * 2
    do = ["attach", ["train", 7], ["begin", 7], "wait", "verify", "warm_starts", "close"]
    given = {"directory": bucket_run, "seed": 77, "do": do}
    resumed = run_processes(PROGRAMS / "group.py", 2, given, env=environment)
    for (first, found, verified, after, _), (_, expected, _) in zip(resumed, before, strict=True):
        assert first["start"] == 4
        assert (found["whole"], found["own"]) == (expected["whole"], expected["own"])
        assert found["seen"] == expected["seen"][4:]
        assert verified == {"verify": 7}
        assert after == {"step": 7, "alike": True, "count": 10}


@pytest.mark.long
@pytest.mark.slow
def test_processes_have_the_service_copy_what_did_not_change(
    gcs: gcs_proxy.FaultProxy, bucket_run: str
) -> None:
    """Also after a restart with one process fewer; each database has folders of two processes."""
    requests: list[str] = []
    gcs.hook = lambda request: requests.append(urllib.parse.unquote(request))

    def run(count: int, first: int, last: int, **settings: Any) -> None:
        arguments = str(first), str(last), json.dumps(settings)
        run_processes(REUSE, count, bucket_run, *arguments, env=gcs.environment())

    def copied(step: int) -> set[str]:
        """The folders that are copied to a step."""
        place = f"{bucket_run.removeprefix('gs://')}/{step}/state/".replace("/", "/o/", 1)
        found = (re.search(f"/rewriteTo/b/{place}([^/]*)/", request) for request in requests)
        return {match[1] for match in found if match}

    both = {"ocdbt.process_unchanged0x0", "ocdbt.process_unchanged0x1"}
    run(2, 1, 6)
    assert [copied(step) for step in range(1, 7)] == [set()] * 4 + [both] * 2
    run(1, 7, 8, restored=6)
    assert [copied(step) for step in (7, 8)] == [both] * 2
    gcs.hook = None
    for step in range(1, 8):
        bucket.remove(epath.Path(bucket_run) / str(step))
    expected = state(mesh_of(2), 8)
    for arrays in by_orbax(epath.Path(bucket_run), 8, on_other_devices=True):
        for name, array in jax.tree_util.tree_leaves_with_path(expected):
            path = "/".join(str(key.key) for key in name)
            assert arrays[f"state/{path}"].tobytes() == np.asarray(array).tobytes()


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
