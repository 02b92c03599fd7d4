"""A path that names a step, and names in a run's directory that only look like those of the run."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from orbax.checkpoint import v1 as ocp
from support.commands import run, run_json
from support.compare import bits
from support.damage import flip_arrays
from support.training import before_enabling, mlp, save

from torchax_ckpt import (
    CheckpointOptions,
    LocalTier,
    TorchaxCheckpointer,
    load_torch_state_dict,
    warm_start,
)
from torchax_ckpt.cli.exit_codes import UNAVAILABLE, USAGE
from torchax_ckpt.errors import CorruptCheckpointError, DirectoryError, StepNotFoundError
from torchax_ckpt.publishing.folder_form import FolderForm
from torchax_ckpt.publishing.follower import Follower
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.torch import LoadPlanner, StorageReader, restore


def native() -> torch.nn.Module:
    """Returns what ``mlp`` returns, in plain torch; torchax must not be enabled."""
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def by_load(path: Path, **step: Any) -> Any:
    return load_torch_state_dict(path, **step)


def by_warm_start(path: Path, **step: Any) -> Any:
    warm_start(model := mlp(), path, **step)
    return model.state_dict()


def by_restore(path: Path, **step: Any) -> Any:
    with before_enabling():
        restore(path, model := native(), **step)
        return model.state_dict()


def by_reader(path: Path, **step: Any) -> Any:
    with before_enabling():
        state = {n: torch.zeros_like(t) for n, t in native().state_dict().items()}
        reader = StorageReader(path, prefix={"model": ""}, **step)
        dcp.load(state, storage_reader=reader, planner=LoadPlanner(), no_dist=True)
        return state


READERS = [by_load, by_warm_start, by_restore, by_reader]


def content(state: Any) -> dict[str, bytes]:
    return {name: bits(tensor)[-1] for name, tensor in state.items()}


@pytest.fixture
def three(directory: Path) -> dict[int, dict[str, bytes]]:
    """A run of three steps, of which 3 is abandoned under its name, and incoming-3 is the run's."""
    found = {}
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model := mlp())
        for step in (1, 2, 3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.full_like(parameter, step))
            ckpt.save(step, force=True)
            ckpt.wait_until_finished()
            found[step] = content(model.state_dict())
    (directory / "3").rename(directory / "incoming-3")
    shutil.copytree(directory / "1", directory / "3")
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of DCP, in one process
@pytest.mark.parametrize("read", READERS)
def test_readers_read_the_step_whose_folder_they_are_given(
    read: Callable[..., Any], three: dict[int, Any], directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(directory / "2", tmp_path / "best-2")
    (tmp_path / "link").symlink_to(tmp_path / "best-2")
    for path in (directory / "2", tmp_path / "best-2", tmp_path / "link"):
        assert content(read(path)) == content(read(path, step=2)) == three[2]
    assert content(read(directory / "1")) == three[1]
    assert content(read(directory / "3")) == three[3]
    assert content(read(directory)) == three[3]
    shutil.rmtree(directory / "2")
    for path, step in ((directory / "1", 2), (directory / "2", None)):
        with pytest.raises((StepNotFoundError, dcp.api.CheckpointException), match="there are: 1"):
            read(path, step=step)


@pytest.mark.usefixtures("three")
def test_an_error_of_a_given_step_names_the_other_steps_of_its_run(directory: Path) -> None:
    flip_arrays(directory / "2")
    said = "Other steps in the directory: 1, 3"
    with pytest.raises(CorruptCheckpointError, match=said):
        by_warm_start(directory / "2")


def moved(run: Path) -> tuple[Path, str]:
    path = (run / "2").rename(run.parent / "best")
    return path, "found a step, whose folder has another name: rename it to its number of steps"


def linked(run: Path) -> tuple[Path, str]:
    path, said = moved(run)
    (run.parent / "link").symlink_to(path)
    return run.parent / "link", said


def of_bare_orbax(run: Path) -> tuple[Path, str]:
    ocp.save(run.parent / "orbax" / "7", {"w": np.arange(3)})
    return run.parent / "orbax" / "7", f"found its step 7; the run is {run.parent / 'orbax'}: give"


def pruned(run: Path) -> tuple[Path, str]:
    return run / "1", f"found no such step; the run is {run}: give this directory, or a name"


def empty(run: Path) -> tuple[Path, str]:
    (run / "3").mkdir()
    return run / "3", f"found its step 3; the run is {run}: give this directory"


def its_state(run: Path) -> tuple[Path, str]:
    return run / "2" / "state", f"found its step 2; the run is {run}: give this directory"


def in_place(run: Path) -> tuple[Path, str]:
    return run / "2", f"found its step 2; the run is {run}: give this directory"


@pytest.mark.parametrize(
    "given", [moved, linked, of_bare_orbax, pruned, empty, its_state, in_place]
)
@pytest.mark.parametrize("is_read_only", [False, True])
def test_no_run_is_started_in_a_step(
    given: Callable[[Path], tuple[Path, str]], is_read_only: bool, directory: Path, tmp_path: Path
) -> None:
    save(directory, mlp(), step=2)
    path, said = given(directory)
    before = sorted(tmp_path.rglob("*"))
    options = CheckpointOptions(read_only=is_read_only)
    for call in (
        lambda: TorchaxCheckpointer(path, options=options),
        lambda: TorchaxCheckpointer(tmp_path / "new", local=LocalTier(path), options=options),
        lambda: Follower(path, tmp_path / "out", FolderForm()),
        lambda: RunDirectory(path).claim(),
    ):
        with pytest.raises(DirectoryError, match=re.escape(said)):
            call()
    for words in (("ls", path), ("prune", path, "--policy", "LatestN(1)")):
        assert said in run(*words, code=USAGE)
    if given in (moved, linked):  # the step does not store its number
        assert "found 'best'. Rename it" in run("copy", path, tmp_path / "new", code=USAGE)
    else:
        assert said in run("copy", directory, path, code=USAGE)
    assert sorted(tmp_path.rglob("*")) == before
    TorchaxCheckpointer(directory / "eval").close()  # no step's name
    TorchaxCheckpointer(tmp_path / "2026").close()  # beside no step


READING = [
    *("show PATH", "verify PATH --read-only", "diff PATH run", "copy PATH new"),
    "export PATH out.safetensors",
]
NEEDING_A_RUN = [
    *("ls PATH", "ls PATH --json", "plan --run PATH", "report PATH new.html"),
    *("prune PATH --policy LatestN(1)", "follow PATH out --once", "follow run PATH --once"),
    *("prune PATH --abandoned --delete", "import weights.safetensors PATH", "copy run PATH"),
]
WRITING = ["report run PATH", "export run PATH"]


@pytest.mark.parametrize("command", [*READING, *NEEDING_A_RUN, *WRITING])
def test_each_command_refuses_a_wrong_place_with_the_code_of_wrong_usage(
    command: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(directory, mlp(), step=3)
    monkeypatch.chdir(tmp_path)
    run("export", "run", "weights.safetensors")
    os.mkfifo("pipe")
    before = sorted(tmp_path.rglob("*"))
    for place in ("weights.safetensors", "pipe", "run/7", "run/3", "run/3/state"):
        words = [place if word == "PATH" else word for word in command.split()]
        if command in READING and place.startswith("run/3"):
            run(*words)
            for new in (tmp_path / "new", tmp_path / "out.safetensors"):
                shutil.rmtree(new) if new.is_dir() else new.unlink(missing_ok=True)
            continue
        exists_already = command in WRITING and place == "weights.safetensors"
        said = run(*words, code=UNAVAILABLE if exists_already else USAGE)
        assert re.search("is (not a|neither a) |expected|no checkpoint at|exists already", said), (
            said
        )
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of DCP, in one process
@pytest.mark.parametrize("read", READERS)
def test_readers_read_the_step_that_they_are_given_although_it_has_a_run_inside(
    read: Callable[..., Any],
    three: dict[int, Any],
    directory: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shutil.copytree(directory / "1", directory / "2" / "5")
    (tmp_path / "link").symlink_to(directory / "2")
    for path in (directory / "2", tmp_path / "link"):
        caplog.clear()
        assert content(read(path)) == three[2]
        (told,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
        said = "reading this step, and none of the steps 5 of another run inside, which a deletion"
        assert told.startswith(f"{path}: {said}")
    with pytest.raises((StepNotFoundError, dcp.api.CheckpointException), match="there are: 2"):
        read(directory / "2", step=5)
    assert content(read(directory / "2" / "5")) == three[1]
    shutil.copytree(directory, tmp_path / "inner")
    (tmp_path / "inner").rename(directory / "2" / "inner")  # a run of its own, in a step's folder
    assert content(read(directory / "2" / "inner")) == three[3]


def test_commands_read_the_step_that_they_are_given_although_it_has_a_run_inside(
    directory: Path, tmp_path: Path
) -> None:
    save(directory, mlp(), step=2)
    shutil.copytree(directory / "2", tmp_path / "5")
    (tmp_path / "5").rename(directory / "2" / "5")
    path = directory / "2"
    assert [step["step"] for step in run_json("ls", path)["steps"]] == [5]
    assert run_json("show", path)["step"] == 2
    assert [step["step"] for step in run_json("verify", path, "--read-only")["steps"]] == [2]
    assert run_json("copy", path, tmp_path / "new")["steps"] == [2]


def test_a_run_that_was_started_in_a_step_goes_on_and_is_told_how_to_get_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "all runs"
    save(directory, mlp(), step=2)
    save(tmp_path / "inner", mlp(), step=5)
    for entry in (tmp_path / "inner").iterdir():  # as releases without the check left them
        entry.rename(directory / "2" / entry.name)
    (directory / "2" / "5").rename(directory / "2" / "incoming-5")
    with TorchaxCheckpointer(directory / "2") as ckpt:
        assert ckpt.attach(mlp()) == 5
        ckpt.save(6, force=True)
    caplog.clear()
    assert run_json("ls", directory / "2")["steps"][-1]["step"] == 6
    (told,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    said = "expected the directory of a run, found a step, {0}, with the steps 5, 6 of another run"
    assert told.startswith(f"{{0}}: {said} inside".format(directory / "2"))
    subprocess.run(told.partition("a directory of its own: ")[2], shell=True, check=True)
    assert sorted(os.listdir(f"{directory}-2")) == ["5", "6", "events"]
    with pytest.raises(DirectoryError, match="found its step 2"):
        TorchaxCheckpointer(directory / "2")
    caplog.clear()
    with TorchaxCheckpointer(f"{directory}-2") as ckpt, TorchaxCheckpointer(directory) as outer:
        assert ckpt.attach(mlp()) == 6
        assert outer.verify(2) == 2
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


# --- names that look like those of a run ---

OF_A_USER = [
    *("deleting-2-old-plots", "deleting-old", "writing-1-a-paper", "writing-2024-11-notes"),
    *("1.orbax-checkpoint-tmp.zip", "lease-of-my-flat.draft", "run-notes.draft", "probe-1.draft"),
    *("incoming-mail", "abandoned-ideas", "moving-3", "deleting-1-unchanged", "notes.partial"),
]
LEFT = [
    *(
        "deleting-3",
        "deleting-3-2",
        "deleting-0-unchanged",
        "writing-4-unchanged",
        "7.orbax-checkpoint-tmp",
    ),
    *("incoming-6.orbax-checkpoint-tmp", "8.orbax-checkpoint-tmp-1700000000"),
    *(f"writing-5-{'0a' * 16}-65024-7-12", f"writing-5-{'0a' * 16}-1"),
    *(f"{kind}-{'0a' * 16}.draft" for kind in ("lease", "run", "probe")),
    f"probe-{'0a' * 16}.renamed.draft",
]


def test_a_cleanup_removes_exactly_what_a_save_may_leave(directory: Path) -> None:
    for name in (*OF_A_USER, *LEFT):
        (directory / name).mkdir(parents=True)
        (directory / name / "precious").touch()
    (directory / "unchanged" / "state" / "mine").mkdir(parents=True)
    for step in (1, 2):
        save(directory, mlp(), step=step)
    left = {"unchanged", "events", "2", "abandoned-1"}
    assert set(os.listdir(directory)) - {"lease"} == {*OF_A_USER, *left}
    assert (directory / "unchanged" / "state" / "mine").exists()


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_link_in_place_of_a_step_is_told(
    is_broken: bool, directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "other", mlp(), step=3)
    directory.mkdir()
    target = tmp_path / "other" / ("9" if is_broken else "3")
    (directory / "3").symlink_to(target)
    with TorchaxCheckpointer(directory) as ckpt:
        assert ckpt.all_steps() == ckpt.all_steps() == []
    (told,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    said = f"{directory / '3'} looks like a step, but is a symbolic link to {target}: ignoring it"
    assert told.startswith(said)
    if not is_broken:
        assert told.endswith("Replace the link by a copy of the folder (cp -a)")
        (directory / "3").unlink()
        shutil.copytree(target, directory / "3")
        assert [step["step"] for step in run_json("ls", directory)["steps"]] == [3]
