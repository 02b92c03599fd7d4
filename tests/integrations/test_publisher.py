"""The Publisher: steps become folders while the program trains, and training never suffers."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import jax
import pytest
import safetensors.torch
import torch
from support.damage import fill_disk
from support.models import values
from support.processes import run_python
from support.stages import at
from support.training import before_enabling, mlp
from support.waiting import wait_until

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.errors import SaveError
from torchax_ckpt.integrations import huggingface
from torchax_ckpt.integrations.huggingface import Publisher
from torchax_ckpt.publishing import follower

pytest_plugins = ("gcs_fixtures",)
SETTINGS: dict[str, Any] = {"format": "safetensors"}


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "POLL_SECS", 0.01)


def train(ckpt: TorchaxCheckpointer, model: torch.nn.Module, num_steps: int) -> None:
    ckpt.attach(model)
    for step in ckpt.steps(num_steps):
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, step)


def weights(out: Path) -> dict[str, Any]:
    folder = out / (out / "latest").read_text().strip()
    with before_enabling():
        return values(safetensors.torch.load_file(folder / "model.safetensors"))


def test_the_last_step_is_published_when_the_training_ends(tmp_path: Path) -> None:
    run, out, model = tmp_path / "run", tmp_path / "out", mlp()
    every = {**SETTINGS, "every": 1000}
    with TorchaxCheckpointer(run) as ckpt, Publisher(ckpt, out, **every) as publisher:
        train(ckpt, model, 3)
        assert not (out / "latest").exists()
    publisher.close()
    assert (out / "latest").read_text() == "step-3\n"
    assert weights(out) == values(model.state_dict())
    # Opened before the checkpointer, it needs the directory only.
    with Publisher(str(run), str(out), **every), TorchaxCheckpointer(run) as ckpt:
        train(ckpt, model, 5)
    assert weights(out) == values(model.state_dict())
    assert sorted(p.name for p in out.glob("step-*")) == ["step-3", "step-5"]


def test_steps_are_published_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "GRACE_SECS", 0)
    out = tmp_path / "out"
    keep = policies.PreserveAll()
    with (
        TorchaxCheckpointer(tmp_path / "run", preservation_policy=keep) as ckpt,
        Publisher(ckpt, out, best="loss:max", keep=1, **SETTINGS),
    ):
        ckpt.attach(mlp())
        for step, loss in enumerate((1.0, 3.0, 2.0, 4.0), 1):
            ckpt.save(step, metrics={"loss": loss}, force=True)
            best = 2 if step == 3 else step
            wait_until(lambda best=best: [*out.glob("step-*")] == [out / f"step-{best}"])  # type: ignore[misc]
    assert (out / "latest").read_text() == "step-4\n"


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_a_step_is_published_as_soon_as_it_is_durable(
    place: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(follower, "POLL_SECS", 1000)
    run, out = tmp_path / "run", tmp_path / "out"
    if place == "bucket":
        request.getfixturevalue("gcs")
        run = request.getfixturevalue("url")
    with TorchaxCheckpointer(run) as ckpt, Publisher(ckpt, out, **SETTINGS):
        ckpt.attach(mlp())
        for step in (1, 2):
            ckpt.save(step, force=True)
            wait_until(lambda n=f"step-{step}": (out / n / "model.safetensors").exists())  # type: ignore[misc]


def test_failures_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    out.mkdir()
    (out / "other").touch()
    with TorchaxCheckpointer(run) as ckpt, Publisher(ckpt, out, **SETTINGS):
        train(ckpt, mlp(), 2)
        wait_until(lambda: "expected a new or empty folder" in caplog.text)
        (out / "other").unlink()
        wait_until(lambda: (out / "latest").exists())
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert [r.getMessage()[:60] for r in warnings if "publishing" in r.name] == [
        f"cannot publish to {out} now: DirectoryError: {out}"[:60]
    ]


def test_a_preempted_program_does_not_stay_to_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "POLL_SECS", 60)
    out = tmp_path / "out"
    for is_preempted in (True, False):
        with TorchaxCheckpointer(tmp_path / "run") as ckpt, Publisher(ckpt, out, **SETTINGS):
            train(ckpt, mlp(), 2)
            monkeypatch.setattr(ckpt, "reached_preemption", lambda was=is_preempted: was)
        assert (out / "latest").exists() is not is_preempted


def test_the_error_of_a_save_is_left_alone(tmp_path: Path) -> None:
    with TorchaxCheckpointer(tmp_path / "run") as ckpt:
        train(ckpt, mlp(), 1)
        ckpt.wait_until_finished()
        with Publisher(ckpt, tmp_path / "out", **SETTINGS):
            free_disk = fill_disk()
            ckpt.save(2, force=True)
        free_disk()
        assert (tmp_path / "out" / "latest").read_text() == "step-1\n"
        with pytest.raises(SaveError, match="saving step 2"):
            ckpt.check_for_errors()
        ckpt.save(2, force=True)


def test_a_save_that_hangs_does_not_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither for ever nor silently."""
    monkeypatch.setattr(huggingface, "_MAX_SAVE_SECS", 0.1)
    out, goes_on = tmp_path / "out", threading.Event()
    with TorchaxCheckpointer(tmp_path / "run") as ckpt:
        with Publisher(ckpt, out, **SETTINGS):
            train(ckpt, mlp(), 1)
            ckpt.wait_until_finished()
            at("mark the step", lambda: goes_on.wait(60))
            ckpt.save(2)
        assert not goes_on.is_set()
        goes_on.set()
    assert (out / "latest").read_text() == "step-1\n"
    assert "the save of step 2" in caplog.text
    assert "publishing the newest durable step without waiting longer" in caplog.text


def test_only_process_0_publishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    publisher = Publisher(tmp_path / "run", tmp_path / "out", **SETTINGS)
    assert "publisher" not in {thread.name for thread in threading.enumerate()}
    publisher.close()
    assert not list(tmp_path.iterdir())


def test_a_wrong_argument_is_raised_at_once(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    for settings, match in (
        ({"every": 1, "best": "loss"}, "exclude each other"),
        ({"format": "gguf"}, "format: expected one of hf, peft, safetensors"),
    ):
        with pytest.raises(ValueError, match=match):
            Publisher(run, tmp_path / "out", **settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_program_that_never_closes_it_ends_all_the_same(tmp_path: Path) -> None:
    program = """
        import logging, sys, threading, time
        import numpy as np
        from torchax_ckpt import TorchaxCheckpointer
        from torchax_ckpt.integrations import huggingface
        from torchax_ckpt.publishing import follower

        logging.basicConfig(level=logging.WARNING)
        run, out = sys.argv[1:]
        with TorchaxCheckpointer(run) as ckpt:
            ckpt.save(1, state={"w": np.ones(8), "v": np.ones((3, 3))}, force=True)
        writing = threading.Event()
        wrote = follower.Follower._wrote

        def slowly(following, num_bytes):
            writing.set()
            following.aborted.wait(60)
            wrote(following, num_bytes)

        follower.Follower._wrote = slowly
        follower.POLL_SECS = 0.01
        publisher = huggingface.Publisher(run, out, format="safetensors", at="state")
        assert writing.wait(60)
        print("ends")
    """
    result = run_python(program, str(tmp_path / "run"), str(tmp_path / "out"), fresh=True)
    assert result.stdout == "ends\n"
    assert "WARNING" not in result.stderr
    assert not list((tmp_path / "out").glob("step-*"))
    assert not list((tmp_path / "out" / ".publishing").iterdir())
