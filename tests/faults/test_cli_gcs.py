"""The command line and plain PyTorch on a bucket: commands, loading, and the commit mark last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath
from gcs_server import FaultyServer
from support.commands import run, run_json
from support.described import Tokenizer
from support.native import run_native, run_ranks, save_net

from torchax_ckpt import TorchaxCheckpointer, load_torch_state_dict, policies
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.errors import DirectoryError, StepNotFoundError
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
    gcs: FaultyServer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, local = f"{url}-copy", tmp_path
    two_programs(url)
    runs = run_json("report", url, page := tmp_path / "report.html")["runs"]
    assert [(run["num_durable"], run["last_step"]) for run in runs] == [(2, 2), (1, 3)]
    assert "durable saves" in page.read_text()
    assert run_json("ls", url)["steps"][1]["kept_by"] == ["LatestN(3)", "newest"]
    assert run_json("plan", "--run", url)["checkpoint_bytes"] > 4096

    assert run_json("verify", url, 2)["steps"][0]["marked"]
    listed = run_json("ls", url)["steps"]
    assert [(s["step"], s["verified"]) for s in listed] == [(1, False), (2, True)]
    assert all(s["size_bytes"] > 4096 for s in listed), listed
    differ = "diff", f"{url}/1", url, "--filter", "state/p/*"
    assert run_json(*differ, code=exit_codes.FOUND)["leaves"][0]["max_abs"] == 1.0
    assert run_json("copy", f"{url}/1", target)["steps"] == [1]
    assert (load_torch_state_dict(target, at="state/p")["w"] == 1).all()
    assert run_json("copy", url, local / "run")["steps"] == [1, 2]
    assert run_json("verify", local / "run", "--all")["steps"][1]["ok"]
    assert run_json("copy", local / "run" / "2", target)["steps"] == [2]
    for place in (url, local / "run", target):
        stored = StoredStep(RunDirectory(place, read_only=True).candidates(2)[-1])
        assert stored.read_assets() == {"tokenizer/tokenizer.json": "{}"}
    for place in (local / "run", target):
        assert not run_json("diff", f"{url}/2", place)["leaves"]
    how = "--format", "safetensors", "--at", "state/p", "--once"
    published = local / "published"
    assert run_json("follow", url, published, *how, "--best", "loss")["step"] == 1
    assert run_json("follow", url, published, *how)["step"] == 2
    assert (published / "latest").read_text() == "step-2\n"
    kept = run_json("prune", url, "--policy", "LatestN(1)", "--delete")["kept"]
    assert kept == [2]
    assert len(gcs.names(f"{url}/events")) == 2  # an object for each program
    assert not [name for name in gcs.names(url) if "lease" in name or name.startswith("1/")]
    assert "2/commit_success.txt" in gcs.names(target)
    look = array_checks.require_stored

    def look_while_it_is_deleted(path: Any, *rest: Any) -> Any:
        (path / commit_record.MARK).unlink()
        (path / "state").rmtree()  # the rest of it is still there
        return look(path, *rest)

    monkeypatch.setattr(array_checks, "require_stored", look_while_it_is_deleted)
    assert "step 1 was deleted meanwhile" in run("verify", target, 1, code=exit_codes.USAGE)


@pytest.mark.slow
def test_a_step_is_no_run_and_the_constructor_asks_no_more_to_know(
    gcs: FaultyServer, url: str
) -> None:
    with TorchaxCheckpointer(url) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state={"p": {"w": np.full(3, step)}}, force=True)
            ckpt.wait_until_finished()
    requests: list[str] = []
    gcs.hook = requests.append
    TorchaxCheckpointer(f"{url}/eval").close()
    assert len(requests) == 5  # as many as before it looked for the files of a step
    for step, said in ((2, "found its step 2"), (7, "found no such step")):
        with pytest.raises(DirectoryError, match=f"{said}; the run is {url}: give this directory"):
            TorchaxCheckpointer(f"{url}/{step}")
    assert (load_torch_state_dict(f"{url}/1", at="state/p")["w"] == 1).all()
    with pytest.raises(StepNotFoundError, match="no checkpoint at step 7; there are: 1, 2"):
        load_torch_state_dict(f"{url}/7", at="state/p")
    said = run("show", f"{url}/2", "--filter", "state/*")
    assert "step 2: 1" in said
    with TorchaxCheckpointer(f"{url}/2/inner") as ckpt:
        ckpt.save(5, state={"n": np.ones(1)}, force=True)
    inner = epath.Path(f"{url}/2/inner/5")
    for name in gcs.names(str(inner)):
        (epath.Path(f"{url}/2/5") / name).write_bytes((inner / name).read_bytes())
    assert run_json("ls", f"{url}/2")["steps"][0]["step"] == 5
    assert (load_torch_state_dict(f"{url}/2", at="state/p")["w"] == 2).all()


@pytest.mark.slow
@pytest.mark.usefixtures("gcs")
def test_ranks_and_one_process_of_plain_pytorch_load_to_the_bit(url: str, tmp_path: Path) -> None:
    save_net(tmp_path, run=url)
    assert run_ranks("adamw-fsdp", 2, tmp_path, RUN=url) == ["", ""]
    source = "assert restore(sys.argv[2], *(objects := built())).step == 2"
    run_native(source + "\nrequire_equal(state_of(*objects), expected)", tmp_path, url)
