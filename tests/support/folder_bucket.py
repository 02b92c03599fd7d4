"""A store of objects in a folder, for tests of what a run does where nothing is renamed or linked.

Steps are begun, committed, set aside and deleted as in a bucket. Objects are files of this host, so
that no server and no request is needed. It is a third kind of medium, and all that one takes.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from etils import epath

from torchax_ckpt.saving.mirroring import mirroring
from torchax_ckpt.storage.medium import bucket, fsync, medium
from torchax_ckpt.storage.medium.bucket_medium import BEGUN, BucketMedium
from torchax_ckpt.storage.medium.local_medium import LocalMedium


class FolderBucket(BucketMedium):
    """Objects below a folder."""

    use = LocalMedium.use
    require_usable = LocalMedium.require_usable
    make_folder = LocalMedium.make_folder
    make_closed_folder = LocalMedium.make_closed_folder
    make_inner_folder = LocalMedium.make_inner_folder
    files = LocalMedium.files
    num_bytes = LocalMedium.num_bytes
    read = LocalMedium.read
    remove_file = LocalMedium.remove_file
    new_log = LocalMedium.new_log
    record = LocalMedium.record
    kvstore = LocalMedium.kvstore
    database_to_read = LocalMedium.database_to_read
    database_to_write = LocalMedium.database_to_write

    def remove_left(self, path: epath.Path, *, is_named_as_step: bool) -> None:
        bucket.remove(path)
        if is_named_as_step:
            path.mkdir()
            (path / BEGUN).touch()


@pytest.fixture
def folder_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a folder in which everything is an object."""
    folder, of = tmp_path / "bucket", medium.of

    def of_kind(path: epath.Path) -> LocalMedium:
        return FolderBucket(path) if path.is_relative_to(folder) else of(path)

    def copy(source: Any, target: Any, names: Any = None) -> None:
        shutil.copytree(source, target, dirs_exist_ok=True)

    monkeypatch.setattr(medium, "of", of_kind)
    monkeypatch.setattr(bucket, "remove", lambda path: fsync.remove(Path(path)))
    monkeypatch.setattr(bucket, "copy", copy)
    return folder


@pytest.fixture(params=["path", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where the mirror is: on a disk, or where all is objects."""
    if request.param == "bucket":
        return Path(request.getfixturevalue("folder_bucket")) / "mirror"
    return tmp_path / "mirror"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to a mirror that fails is tried again at once."""
    monkeypatch.setattr(mirroring, "_RETRY_SECS", 0.02)
    monkeypatch.setattr(mirroring, "_LAST_PAUSE_SECS", 0.02)


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    return tmp_path / "mirror"
