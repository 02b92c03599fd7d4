"""follow: what the command prints, refuses and waits for, and how signals end it."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from support.commands import run, run_json
from support.processes import Started
from support.steps import save_states
from support.waiting import wait_until

from torchax_ckpt.cli import exit_codes
from torchax_ckpt.publishing.published_folders import CONTROL

WEIGHTS = ("--format", "safetensors", "--at", "state")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    states = {
        step: {name: np.full((300 + name, 99), step) for name in range(3)} for step in (10, 20)
    }
    metrics = {10: {"loss": 0.1}, 20: {"loss": 0.2}}
    return save_states(tmp_path_factory.mktemp("saved") / "run", states, metrics)


def test_once_publishes_what_is_due(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_json("follow", saved, out, *WEIGHTS, "--every", 21, "--once") == {
        "step": None,
        "folder": None,
        "metrics": None,
    }
    assert run_json("follow", saved, out, *WEIGHTS, "--best", "loss:min", "--once") == {
        "step": 10,
        "folder": str(out / "step-10"),
        "metrics": {"loss": 0.1},
    }
    said = run("follow", saved, out, *WEIGHTS, "--every", 10, "--once")
    assert said == f"step 20: published as {out / 'step-20'}\n"
    assert run("follow", saved, out, *WEIGHTS, "--best", "loss:max", "--once") == "no step is due\n"
    assert (out / "latest").read_text() == "step-20\n"


def test_wrong_usage_is_said(saved: Path, tmp_path: Path) -> None:
    out, usage = tmp_path / "out", exit_codes.USAGE
    no_config = "without which transformers cannot load a folder: save the config"
    taken = "expected a new or empty folder"
    for words, code, said in (
        ((saved, out, "--best", "loss:low"), usage, "or METRIC:max, found 'loss:low'"),
        ((saved, out, "--at", "state"), usage, no_config),
        (
            (saved, out, "--format", "peft", "--max-shard-size", 1),
            usage,
            "follow: --max-shard-size: PEFT",
        ),
        ((saved, saved / "out"), usage, "outside of the run's directory"),
        ((tmp_path / "none", out), usage, "no such directory"),
        ((saved, tmp_path.parent, *WEIGHTS), exit_codes.UNAVAILABLE, taken),
    ):
        assert said in run("follow", *words, "--once", code=code)
        assert not list(out.glob("step-*"))


SLOWLY = """
import signal, sys, time
from torchax_ckpt.publishing import follower

wrote = follower.Follower._wrote

def slowly(self, num_bytes):
    while "{slow}" and not self.aborted.wait(0.01):
        pass
    wrote(self, num_bytes)

follower.Follower._wrote = slowly
follower.POLL_SECS = 0.05
from torchax_ckpt.cli.app import app
app(sys.argv[1:])
"""


@pytest.mark.slow
def test_it_waits_for_a_run_goes_on_and_ends_with_a_signal(saved: Path, tmp_path: Path) -> None:
    run_path, out = tmp_path / "run", tmp_path / "out"
    words = ("follow", str(run_path), str(out), *WEIGHTS)
    with Started("-c", SLOWLY.format(slow=""), *words) as started:
        wait_until(lambda: "does not exist yet; waiting for it" in started.output()[1])
        shutil.copytree(saved, tmp_path / "copy")
        (tmp_path / "copy").rename(run_path)
        wait_until(lambda: (out / "latest").exists())
        (out / "latest").unlink()  # whatever happens, it goes on
        wait_until(lambda: (out / "latest").exists())
        started.process.send_signal(signal.SIGINT)
        assert started.process.wait(60) == exit_codes.INTERRUPTED
        assert started.output()[0] == f"step 20: published as {out / 'step-20'}\n"
    shutil.rmtree(out)
    with Started("-c", SLOWLY.format(slow="yes"), *words) as started:
        wait_until(lambda: any((out / CONTROL).glob("writing-*/*")))
        started.process.terminate()
        assert started.process.wait(60) == exit_codes.OK
        assert started.output() == ("", "")
    with Started("-c", SLOWLY.format(slow="yes"), *words, "--once") as started:
        wait_until(lambda: any((out / CONTROL).glob("writing-*/*")))
        started.process.terminate()
        assert started.process.wait(60) == exit_codes.TERMINATED
    assert sorted(os.listdir(out)) == [CONTROL]
    assert os.listdir(out / CONTROL) == []
