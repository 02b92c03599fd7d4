"""Files and folders that are written whole, or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.formats.tensor_files import writing
from torchax_ckpt.storage.medium import fsync


@pytest.mark.parametrize("failing", ["rename", "sync"])
def test_of_several_files_and_folders_none_is_left_if_one_cannot_be_named(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file, last = tmp_path / "folder", tmp_path / "file", tmp_path / "last"
    replace, sync = Path.replace, fsync.sync

    def renamed(partial: Path, final: Path) -> Any:
        if final == last and failing == "rename":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(partial, final)

    def synced(path: Any) -> None:
        if failing == "sync" and last.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(path)

    monkeypatch.setattr(Path, "replace", renamed)
    monkeypatch.setattr(fsync, "sync", synced)
    with (
        pytest.raises(DirectoryError, match="No space left"),
        writing([folder, file, last]) as partials,
    ):
        partials[0].mkdir()
        for partial in (partials[0] / "inner", *partials[1:]):
            partial.write_text("1")
    assert [*tmp_path.iterdir()] == []


def test_a_folder_of_another_program_that_took_the_name_meanwhile_is_spared(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(DirectoryError, match="cannot write"), writing([out]) as (partial,):
        for folder in (partial, out):
            folder.mkdir()
            (folder / "file").write_text(folder.name)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "file").read_text() == "out"
