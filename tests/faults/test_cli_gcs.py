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
from support.processes import run_python

PROGRAM = """
    import json, sys
    import numpy as np
    from typer.testing import CliRunner
    from torchax_ckpt import TorchaxCheckpointer, load_torch_state_dict, policies
    from torchax_ckpt.cli.app import app
    from torchax_ckpt.storage.arrays import array_checks
    from torchax_ckpt.storage.directory import commit_record

    run, target, page, local = sys.argv[1:]

    def command(*args, code=0):
        result = CliRunner().invoke(app, [*map(str, args), "--json"])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout) if result.stdout else result.stderr

    with TorchaxCheckpointer(run, preservation_policy=policies.PreserveAll()) as ckpt:
        for step in (1, 2):
            state = {"p": {"w": np.full(4096, step, np.float32)}}
            ckpt.save(step, state=state, metrics={"loss": step}, force=True)

    with TorchaxCheckpointer(run, preservation_policy=policies.LatestN(3)) as ckpt:
        ckpt.save(3, state={"p": {"w": np.zeros(4096)}}, force=True)
        ckpt.delete(3)
    first, second = command("report", run, page)["runs"]
    assert (first["num_durable"], first["closed"], first["last_step"]) == (2, True, 2), first
    assert (second["num_durable"], second["closed"], second["last_step"]) == (1, True, 3), second
    assert "durable saves" in open(page).read()
    assert command("ls", run)["steps"][1]["kept_by"] == ["LatestN(3)", "newest"]
    assert command("plan", "--measured", run)["checkpoint_bytes"] > 4096

    assert command("verify", run, 2)["steps"][0]["marked"]
    listed = command("ls", run)["steps"]
    assert [(s["step"], s["verified"]) for s in listed] == [(1, False), (2, True)]
    assert all(s["size_bytes"] > 4096 for s in listed), listed
    found = command("diff", run + "/1", run, "--filter", "state/p/*", code=1)
    assert found["leaves"][0]["max_abs"] == 1.0
    assert command("copy", run + "/1", target)["steps"] == [1]
    assert (load_torch_state_dict(target, at="state/p")["w"] == 1).all()
    assert command("copy", run, local)["steps"] == [1, 2]
    assert command("verify", local, "--all")["steps"][1]["ok"]
    assert command("copy", local + "/2", target)["steps"] == [2]
    for place in (local, target):
        assert not command("diff", run + "/2", place)["leaves"]
    assert command("prune", run, "--policy", "LatestN(1)", "--delete")["kept"] == [2]

    look = array_checks.require_stored

    def look_while_it_is_deleted(path, *rest):
        (path / commit_record.MARK).unlink()
        (path / "state").rmtree()  # the rest of it is still there
        return look(path, *rest)

    array_checks.require_stored = look_while_it_is_deleted
    assert "step 1 was deleted meanwhile" in command("verify", target, 1, code=2)
"""


@pytest.fixture
def gcs() -> Iterator[gcs_proxy.FaultProxy]:
    proxy = gcs_proxy.FaultProxy(gcs_server.GcsServer())
    yield proxy
    proxy.stop()
    proxy.server.stop()


def test_commands_work_on_a_bucket(gcs: gcs_proxy.FaultProxy, tmp_path: Path) -> None:
    page = str(tmp_path / "report.html")
    places = ("gs://bucket/run", "gs://bucket/copy", page, str(tmp_path / "local"))
    run_python(PROGRAM, *places, env=gcs.environment())
    assert len(gcs.server.names("run/events/")) == 2  # an object for each program
    assert not [name for name in gcs.server.names() if "lease" in name]
    assert not gcs.server.names("run/1/")
    assert "copy/2/commit_success.txt" in gcs.server.names()
