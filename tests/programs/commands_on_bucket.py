"""Runs every command of torchax-ckpt on a run in a bucket.

    python commands_on_bucket.py RUN TARGET PAGE LOCAL

RUN and TARGET, a copy, are in the bucket; PAGE, a report, and LOCAL, a copy, are local paths.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from support.described import Tokenizer
from typer.testing import CliRunner

from torchax_ckpt import TorchaxCheckpointer, load_torch_state_dict, policies
from torchax_ckpt.cli.app import app
from torchax_ckpt.storage.arrays import array_checks
from torchax_ckpt.storage.directory import commit_record
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored.stored_step import StoredStep

run, target, page, local = sys.argv[1:]


def command(*args: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*map(str, args), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if result.stdout else result.stderr


with TorchaxCheckpointer(run, preservation_policy=policies.PreserveAll()) as ckpt:
    ckpt.attach(tokenizer=Tokenizer({"tokenizer.json": "{}"}), rng=False)
    for step in (1, 2):
        state = {"p": {"w": np.full(4096, step, np.float32)}}
        ckpt.save(step, state=state, metrics={"loss": step}, force=True)

with TorchaxCheckpointer(run, preservation_policy=policies.LatestN(3)) as ckpt:
    ckpt.save(3, state={"p": {"w": np.zeros(4096)}}, force=True)
    ckpt.delete(3)
first, second = command("report", run, page)["runs"]
assert (first["num_durable"], first["closed"], first["last_step"]) == (2, True, 2), first
assert (second["num_durable"], second["closed"], second["last_step"]) == (1, True, 3), second
assert "durable saves" in Path(page).read_text()
assert command("ls", run)["steps"][1]["kept_by"] == ["LatestN(3)", "newest"]
assert command("plan", "--run", run)["checkpoint_bytes"] > 4096

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
for place in (run, local, target):
    stored = StoredStep(RunDirectory(place, read_only=True).find(2))
    assert stored.read_assets() == {"tokenizer/tokenizer.json": "{}"}
for place in (local, target):
    assert not command("diff", run + "/2", place)["leaves"]
published = Path(local).with_name("published")
follow = (published, "--format", "safetensors", "--at", "state/p", "--once")
assert command("follow", run, *follow, "--best", "loss")["step"] == 1
assert command("follow", run, *follow)["step"] == 2
assert (published / "latest").read_text() == "step-2\n"
assert command("prune", run, "--policy", "LatestN(1)", "--delete")["kept"] == [2]

look = array_checks.require_stored


def look_while_it_is_deleted(path: Any, *rest: Any) -> Any:
    (path / commit_record.MARK).unlink()
    (path / "state").rmtree()  # the rest of it is still there
    return look(path, *rest)


array_checks.require_stored = look_while_it_is_deleted  # type: ignore[assignment]
assert "step 1 was deleted meanwhile" in command("verify", target, 1, code=2)
again = Path(local).with_name("again")
# Its only step is deleted as it is read, and skipped.
assert command("follow", run, again, *follow[1:])["step"] is None
assert not list(again.glob("step-*"))
