"""Google Drive, as the directory of a run and as a mirror: late uploads, no links, a trash."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.steps import save
from support.training import adamw, mlp, train_step

from torchax_ckpt import CheckpointOptions, Mirror, TorchaxCheckpointer, policies
from torchax_ckpt.errors import SaveError
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import permissions

if TYPE_CHECKING:
    from support.drive import Drive

pytest_plugins = ("support.drive",)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is Google Drive", "ignore:skipping a damaged step"
)

STEP_BYTES = 240_000


def content(step: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(step).standard_normal(STEP_BYTES // 8), "step": step}


def opened(directory: Path, **settings: Any) -> TorchaxCheckpointer:
    ckpt = TorchaxCheckpointer(directory, preservation_policy=policies.LatestN(2), **settings)
    ckpt.attach(stateful={})
    return ckpt


def test_a_run_there_says_once_when_its_steps_are_safe_and_what_the_trash_does(
    drive: Drive,
) -> None:
    text = rf"{drive.folder}.*flush_and_unmount\(\).*trash keeps.*empties the files of a step"
    with pytest.warns(UserWarning, match=text) as caught, opened(drive.folder / "run") as ckpt:
        save(ckpt, 1, 2, 3, of=content)
    assert len(caught) == 1


def test_a_long_run_there_stays_within_the_quota_although_the_trash_counts(drive: Drive) -> None:
    drive.quota_bytes = 4 * STEP_BYTES
    frozen = CheckpointOptions(reuse=["state.w"])
    for options in (CheckpointOptions(), frozen):
        with opened(drive.folder / f"run-{options.reuse}", options=options) as ckpt:
            for step in range(1, 9):
                save(ckpt, step, of=lambda _: content(0))
            assert ckpt.load()["step"] == 0
        shutil.rmtree(drive.folder / f"run-{options.reuse}")
        drive.trash_bytes = 0


def test_no_file_of_a_step_is_emptied_while_it_counts(drive: Drive) -> None:
    with opened(drive.folder / "run", mirror=drive.folder / "mirror") as ckpt:
        save(ckpt, 1, 2, 3, 4, of=content)
    assert {path.parts[0] for path in drive.emptied} == {"run", "mirror"}
    assert {path.parts[1].partition("-")[0] for path in drive.emptied} == {"deleting"}
    assert drive.trash_bytes < STEP_BYTES / 10


def test_a_failed_save_leaves_no_bytes_in_the_trash(drive: Drive) -> None:
    with opened(drive.folder / "run") as ckpt:
        save(ckpt, 1, of=content)
        drive.quota_bytes = drive.used_bytes() + STEP_BYTES / 2
        with pytest.raises(SaveError, match="quota is used up.*empty the trash too"):
            save(ckpt, 2, of=content)
        assert ckpt.all_steps() == [1]
        drive.quota_bytes *= 2
        save(ckpt, 3, of=content)
        np.testing.assert_array_equal(ckpt.load(1)["w"], content(1)["w"])
    assert drive.trash_bytes < STEP_BYTES / 10


def test_a_file_with_a_second_name_is_not_emptied(drive: Drive, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("kept")
    os.symlink(tmp_path / "outside", drive.folder / "link")
    os.mkfifo(drive.folder / "pipe")
    (drive.folder / "file").write_text("gone")
    (tmp_path / "second").write_text("kept")
    subprocess.run(["ln", tmp_path / "second", drive.folder / "second"], check=True)
    permissions.empty_for_trash(drive.folder)
    assert (drive.folder / "file").read_text() == ""
    assert [(tmp_path / name).read_text() for name in ("outside", "second")] == ["kept", "kept"]


def test_a_run_there_is_safe_once_the_mount_was_flushed(drive: Drive) -> None:
    model = mlp()
    optimizer = adamw(model)
    with TorchaxCheckpointer(drive.folder / "run") as ckpt:
        ckpt.attach(model, optimizer)
        for step in ckpt.steps(3):
            train_step(model, optimizer, step)
    expected = {name: np.asarray(t.numpy()) for name, t in model.state_dict().items()}
    drive.flush()
    with TorchaxCheckpointer(drive.folder / "run") as ckpt:
        ckpt.attach(model, optimizer)
        for step in ckpt.steps(4):
            train_step(model, optimizer, step)
    drive.lose_machine(drive.files())
    with TorchaxCheckpointer(drive.folder / "run") as ckpt:
        fresh = mlp()
        assert ckpt.attach(fresh, adamw(fresh)) == 3
        for name, tensor in fresh.state_dict().items():
            np.testing.assert_array_equal(tensor.numpy(), expected[name])


def test_a_run_there_loses_no_flushed_step_to_one_more_save(drive: Drive) -> None:
    with opened(drive.folder / "run") as ckpt:
        save(ckpt, 1, 2, of=content)
    drive.flush()
    with opened(drive.folder / "run") as ckpt:
        save(ckpt, 3, of=content)
    now, seen, emptied = drive.files(), set(), list[Path]()
    for seed in range(12):
        drive.lose_machine(now, random.Random(seed))
        deleted = (drive.folder / "run/1").rglob("manifest.ocdbt")
        emptied += [path for path in deleted if not path.stat().st_size]
        with TorchaxCheckpointer(drive.folder / "run") as ckpt:
            start = ckpt.attach(stateful={})
            seen.add(start)
            np.testing.assert_array_equal(ckpt.load(start)["w"], content(start)["w"])
    assert emptied
    assert 2 in seen
    assert seen <= {2, 3}


def test_a_mirror_there_loses_no_flushed_step_to_one_more_copy(
    drive: Drive, directory: Path
) -> None:
    mirror = Mirror(drive.folder / "mirror")
    with opened(directory, mirror=mirror) as ckpt:
        save(ckpt, 1, 2, of=content)
    drive.flush()
    with opened(directory, mirror=mirror) as ckpt:
        save(ckpt, 3, of=content)
    now, seen = drive.files(), set()
    for seed in range(12):
        drive.lose_machine(now, random.Random(seed))
        shutil.rmtree(directory)
        ckpt = TorchaxCheckpointer(directory, mirror=mirror)
        try:
            start = ckpt.attach(stateful={})
            seen.add(start)
            np.testing.assert_array_equal(ckpt.load(start)["w"], content(start)["w"])
        finally:
            ckpt.close()
    assert 2 in seen
    assert seen <= {2, 3}


def test_a_step_of_a_mirror_has_few_files(drive: Drive, directory: Path) -> None:
    model = mlp()
    with TorchaxCheckpointer(directory, mirror=drive.folder / "mirror") as ckpt:
        ckpt.attach(model, adamw(model))
        ckpt.save(1, force=True)
    [step] = RunDirectory(drive.folder / "mirror", read_only=True).steps()
    assert sum(path.is_file() for path in Path(step.path).rglob("*")) <= 14
