"""The command line on a bucket: the commands, and the commit mark last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gcs_proxy
import numpy as np
import pytest
from support.commands import run, run_json
from support.described import Tokenizer

from torchax_ckpt import TorchaxCheckpointer, load_torch_state_dict, policies
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.storage.arrays import array_checks
from torchax_ckpt.storage.directory import commit_record
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored.stored_step import StoredStep

pytest_plugins = ("gcs_fixtures",)


def two_programs(place: str) -> None:
    """One saves two steps, the other a third, which it deletes."""
    with TorchaxCheckpointer(place, preservation_policy=policies.PreserveAll()) as ckpt:
        ckpt.attach(tokenizer=Tokenizer({"tokenizer.json": "{}"}), rng=False)
        for step in (1, 2):
            state = {"p": {"w": np.full(4096, step, np.float32)}}
            ckpt.save(step, state=state, metrics={"loss": step}, force=True)
    with TorchaxCheckpointer(place, preservation_policy=policies.LatestN(3)) as ckpt:
        ckpt.save(3, state={"p": {"w": np.zeros(4096)}}, force=True)
        ckpt.delete(3)


@pytest.mark.long
@pytest.mark.slow
def test_commands_work_on_a_bucket(
    gcs: gcs_proxy.FaultProxy, bucket_run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, target, local = bucket_run.removeprefix("gs://bucket/"), f"{bucket_run}-copy", tmp_path
    two_programs(bucket_run)
    first, second = run_json("report", bucket_run, page := tmp_path / "report.html")["runs"]
    assert (first["num_durable"], first["closed"], first["last_step"]) == (2, True, 2), first
    assert (second["num_durable"], second["closed"], second["last_step"]) == (1, True, 3), second
    assert "durable saves" in page.read_text()
    assert run_json("ls", bucket_run)["steps"][1]["kept_by"] == ["LatestN(3)", "newest"]
    assert run_json("plan", "--run", bucket_run)["checkpoint_bytes"] > 4096

    assert run_json("verify", bucket_run, 2)["steps"][0]["marked"]
    listed = run_json("ls", bucket_run)["steps"]
    assert [(s["step"], s["verified"]) for s in listed] == [(1, False), (2, True)]
    assert all(s["size_bytes"] > 4096 for s in listed), listed
    differ = "diff", f"{bucket_run}/1", bucket_run, "--filter", "state/p/*"
    assert run_json(*differ, code=exit_codes.FOUND)["leaves"][0]["max_abs"] == 1.0
    assert run_json("copy", f"{bucket_run}/1", target)["steps"] == [1]
    assert (load_torch_state_dict(target, at="state/p")["w"] == 1).all()
    assert run_json("copy", bucket_run, local / "run")["steps"] == [1, 2]
    assert run_json("verify", local / "run", "--all")["steps"][1]["ok"]
    assert run_json("copy", local / "run" / "2", target)["steps"] == [2]
    for place in (bucket_run, local / "run", target):
        stored = StoredStep(RunDirectory(place, read_only=True).find(2))
        assert stored.read_assets() == {"tokenizer/tokenizer.json": "{}"}
    for place in (local / "run", target):
        assert not run_json("diff", f"{bucket_run}/2", place)["leaves"]
    how = "--format", "safetensors", "--at", "state/p", "--once"
    published = local / "published"
    assert run_json("follow", bucket_run, published, *how, "--best", "loss")["step"] == 1
    assert run_json("follow", bucket_run, published, *how)["step"] == 2
    assert (published / "latest").read_text() == "step-2\n"
    kept = run_json("prune", bucket_run, "--policy", "LatestN(1)", "--delete")["kept"]
    assert kept == [2]
    assert len(gcs.server.names(f"{prefix}/events/")) == 2  # an object for each program
    assert not [name for name in gcs.server.names(prefix) if "lease" in name]
    assert not gcs.server.names(f"{prefix}/1/")
    assert f"{prefix}-copy/2/commit_success.txt" in gcs.server.names()
    look = array_checks.require_stored

    def look_while_it_is_deleted(path: Any, *rest: Any) -> Any:
        (path / commit_record.MARK).unlink()
        (path / "state").rmtree()  # the rest of it is still there
        return look(path, *rest)

    monkeypatch.setattr(array_checks, "require_stored", look_while_it_is_deleted)
    assert "step 1 was deleted meanwhile" in run("verify", target, 1, code=exit_codes.USAGE)
    # Its only step is deleted as it is read, and skipped.
    again = local / "again"
    assert run_json("follow", target, again, *how)["step"] is None
    assert not list(again.glob("step-*"))
