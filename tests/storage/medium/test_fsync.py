"""What is durable survives a loss of power: it was synced before it had a name, then the name."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from etils import epath
from support.steps import save
from support.training import mlp, save_state

from torchax_ckpt import TorchaxCheckpointer
from torchax_ckpt.errors import SaveError
from torchax_ckpt.formats.state_dict import save_dcp, save_torch_file
from torchax_ckpt.plain_torch import native_torch
from torchax_ckpt.storage.directory import commit_record
from torchax_ckpt.storage.medium import fsync, permissions
from torchax_ckpt.storage.writing import array_writer

State = tuple[int, int, int]


def state_of(status: os.stat_result) -> State:
    """What tells a file or folder, as it was synced, from what it became afterwards."""
    return status.st_ino, status.st_size, status.st_mtime_ns


class Syncs:
    """What was synced, as it was then: before a step had its name, and after."""

    def __init__(self, step: Path) -> None:
        self.before: set[State] = set()
        self.after: set[State] = set()
        self._step = step
        self._fsync = os.fsync

    def __call__(self, opened: int) -> None:
        self._fsync(opened)
        there = self.after if self._step.exists() else self.before
        there.add(state_of(os.fstat(opened)))


@pytest.fixture
def syncs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Syncs:
    found = Syncs(directory / "deep" / "er" / "1")
    monkeypatch.setattr(os, "fsync", found)
    return found


def test_everything_of_a_step_is_synced_before_it_has_its_name_and_then_the_name(
    directory: Path, syncs: Syncs
) -> None:
    run = directory / "deep" / "er"
    with TorchaxCheckpointer(run) as ckpt:
        ckpt.attach(mlp())
        ckpt.save(1, force=True)
        ckpt.wait_until_finished()
        assert run.stat().st_ino in {inode for inode, *_ in syncs.after}
    found = [run / "1", *(run / "1").rglob("*")]
    names = {path.name for path in found}
    assert {"_CHECKPOINT_METADATA", "data.json", "manifest.ocdbt", commit_record.MARK} <= names
    left = {path for path in found if state_of(path.lstat()) not in syncs.before}
    # These TensorStore has synced as it wrote them; see below.
    assert left == {path for path in found if path.parent.name == "d"}
    assert left
    # The folders that the first save has made, each in the one above it.
    inodes = {inode for inode, *_ in syncs.before}
    assert {path.stat().st_ino for path in (directory, directory / "deep")} <= inodes


@pytest.mark.parametrize("is_linked", [False, True])
def test_the_names_of_folders_above_a_run_are_synced_whoever_made_them(
    is_linked: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    above = directory / "made" / "by" / "others"
    above.mkdir(parents=True)
    (directory / "link").symlink_to(above)
    run = (directory / "link" if is_linked else above) / "run"
    syncs = Syncs(run / "1")
    monkeypatch.setattr(os, "fsync", syncs)
    save_state(run, {"w": np.arange(3)})
    device = directory.stat().st_dev
    may = [path for path in (above, *above.parents) if os.access(path, os.R_OK)]
    expected = [path for path in may if path.stat().st_dev == device]
    assert {directory, directory / "made", above} <= {*expected}
    assert {path.stat().st_ino for path in expected} <= {inode for inode, *_ in syncs.before}


def test_a_folder_that_the_user_may_not_list_is_passed_over(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, sync, told = directory / "closed", fsync.sync, list[Path]()
    closed.mkdir(parents=True)

    def refused(path: Any) -> None:
        told.append(Path(path))
        if told[-1] == closed:
            raise PermissionError(errno.EACCES, "Permission denied")
        sync(path)

    monkeypatch.setattr(fsync, "sync", refused)
    permissions.make_folder(epath.Path(closed / "run"))
    assert told[:2] == [closed, directory]


def test_tensorstore_syncs_what_it_writes() -> None:
    """A trace of a save shows an fsync of every file in ``d``, and of ``d``."""
    assert array_writer._context()["file_io_sync"].to_json() is True


def test_a_step_that_is_not_synced_is_none(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TorchaxCheckpointer(directory) as ckpt:
        save(ckpt, 1, of={"w": np.arange(3)})
        with monkeypatch.context() as failing:
            failing.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "I/O error")))
            ckpt.save(2, state={"w": np.arange(3)}, force=True)
            with pytest.raises(SaveError, match="I/O error"):
                ckpt.wait_until_finished()
        assert ckpt.all_steps() == [1]
        save(ckpt, 3, of={"w": np.arange(3)})
        assert 3 in ckpt.all_steps()


def test_folders_need_not_be_synced(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def only_files(opened: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{opened}"):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", only_files)
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.save(1, state={"w": np.arange(3)}, force=True)
    assert ckpt.all_steps() == [1]
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EINVAL, "Invalid argument")))
    fsync.sync(directory)
    with pytest.raises(OSError, match="Invalid argument"):  # but files must
        fsync.sync(directory / "1" / "_CHECKPOINT_METADATA")


EXPORTS: dict[str, Callable[[Path], Any]] = {
    "dcp": lambda out: save_dcp({"model": {"w": torch.ones(3, device="cpu")}}, out),
    "torch": lambda out: save_torch_file({"w": torch.ones(3, device="cpu")}, out),
}


@pytest.mark.parametrize("write", EXPORTS.values(), ids=EXPORTS)
def test_what_is_exported_is_synced_before_it_has_its_name_and_then_the_name(
    write: Callable[[Path], Any], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = directory / "new" / "out"
    syncs = Syncs(out)
    monkeypatch.setattr(os, "fsync", syncs)
    with native_torch():
        write(out)
    found = {out, *out.rglob("*")}
    assert {state_of(path.lstat()) for path in found} <= syncs.before
    assert {path.stat().st_ino for path in (directory, directory.parent)} <= {
        inode for inode, *_ in syncs.before
    }
    assert out.parent.stat().st_ino in {inode for inode, *_ in syncs.after}


def test_a_deleted_name_goes_before_files(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut could otherwise leave the step under its name, without some of its files."""
    done: list[str] = []
    fsync_, rmtree = os.fsync, epath.Path(directory).__class__.rmtree

    def synced(opened: int) -> None:
        fsync_(opened)
        done.append(f"synced {os.readlink(f'/proc/self/fd/{opened}')}")

    def removed(path: Any, *args: Any, **kwargs: Any) -> None:
        done.append(f"removed {path}")
        rmtree(path, *args, **kwargs)

    with TorchaxCheckpointer(directory) as ckpt:
        save(ckpt, 1, of={"w": np.arange(3)})
        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(epath.Path(directory).__class__, "rmtree", removed)
        ckpt.delete(1)
    assert done == [f"synced {directory}", f"removed {directory / 'deleting-1'}"]
