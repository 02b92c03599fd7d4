"""The folder of a step until its commit: what a program leaves there that fails."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from torchax_ckpt.errors import LeaseError
from torchax_ckpt.formats.importing import import_weights, open_files
from torchax_ckpt.storage.directory import step_folder
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import fsync


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {"lease"}


def test_a_failed_import_leaves_no_file(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "weights.safetensors"
    save_file({"w": np.arange(4, dtype=np.float32)}, weights)
    sync_tree = fsync.sync_tree

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fsync, "sync_tree", full)  # once the commit mark is written
    with pytest.raises(OSError, match="No space left"):
        import_weights(open_files(weights), directory, ties={})
    assert names(directory) == set()
    monkeypatch.setattr(fsync, "sync_tree", sync_tree)
    assert import_weights(open_files(weights), directory, ties={}).step == 0
    assert names(directory) == {"0"}


@pytest.fixture
def run(directory: Path) -> Iterator[RunDirectory]:
    run = RunDirectory(directory)
    with step_folder.claimed(run):
        yield run


def test_a_folder_goes_with_the_failure_but_not_if_the_lease_is_lost(run: RunDirectory) -> None:
    for error, stays in ((KeyboardInterrupt(), False), (LeaseError("lost"), True)):
        with pytest.raises(type(error)), step_folder.writing(run, 1) as folder:
            (folder.path / "file").write_bytes(b"written")
            raise error
        assert folder.path.exists() is stays
        assert not run.steps()
