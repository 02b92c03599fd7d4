"""The Reader: the tensors that changed, of whole publications only, on disks and in buckets."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
from etils import epath
from gcs_server import FaultyServer
from support.compare import bits
from support.damage import flip_bit

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.errors import CorruptCheckpointError, DirectoryError, LeaseError
from torchax_ckpt.publishing import Reader, digests, follower
from torchax_ckpt.publishing.folder_form import FolderForm
from torchax_ckpt.publishing.published_folders import CONTROL, PublishedFolders
from torchax_ckpt.storage.medium import bucket, seals
from torchax_ckpt.stored import copy

pytest_plugins = ("gcs_fixtures",)
FORM = FolderForm(format="safetensors", at="state", max_shard_bytes=1 << 12)
FROZEN = {
    "b": np.arange(4096).astype(ml_dtypes.bfloat16),
    "flag": np.array(True),
    "none": np.zeros((0, 3), np.float32),
}


def state(step: int) -> dict[str, Any]:
    return {"a": np.full((30, 40), step), **FROZEN, "z": np.float32(step)}


def expected(step: int, *names: str) -> dict[str, Any]:
    return {n: bits(a)[1:] for n, a in state(step).items() if n in (names or state(step))}


def polled(reader: Reader) -> dict[str, Any]:
    return {name: bits(tensor)[1:] for name, tensor in reader.poll().items()}


@pytest.fixture
def publish(tmp_path: Path) -> Callable[..., None]:
    def publish(out: Any, *steps: int) -> None:
        """Saves and publishes steps in a program that deletes all other folders."""
        keep = policies.PreserveAll()
        with (
            TorchaxCheckpointer(tmp_path / "run", preservation_policy=keep) as ckpt,
            follower.Follower(tmp_path / "run", out, FORM, keep=1) as following,
        ):
            for step in steps:
                ckpt.save(step, state=state(step), force=True)
                ckpt.wait_until_finished()
                new = following.publish_due()
                assert new is not None
                assert str(new.path) == f"{out}/step-{step}"

    return publish


@pytest.fixture(params=["disk", pytest.param("bucket", marks=pytest.mark.slow)])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> epath.Path:
    if request.param == "disk":
        return epath.Path(tmp_path / "out")
    request.getfixturevalue("gcs")
    return epath.Path(request.getfixturevalue("url"))


def test_all_tensors_come_first_and_then_those_that_changed(out: epath.Path, publish: Any) -> None:
    reader = Reader(out)
    assert (polled(reader), reader.step) == ({}, None)
    publish(out, 1)
    assert (polled(reader), reader.step) == (expected(1), 1)
    assert polled(reader) == {}
    publish(out, 2, 3)
    assert (polled(reader), reader.step) == (expected(3, "a", "z"), 3)
    assert polled(reader) == {}


def test_if_a_folder_is_deleted_meanwhile_the_next_one_is_read(
    out: epath.Path, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "GRACE_SECS", 0)
    reader, read = Reader(out), digests.read
    publish(out, 1)

    def read_late(folder: epath.Path) -> Any:
        monkeypatch.setattr(digests, "read", read)
        found = read(folder)
        publish(out, 2)
        assert not folder.exists()
        return found

    monkeypatch.setattr(digests, "read", read_late)
    assert (polled(reader), reader.step) == (expected(2), 2)
    (out / "latest").write_text("step-9\n")
    with pytest.raises(DirectoryError, match=r"cannot read .*step-9.*digests\.json"):
        reader.poll()


def test_damage_and_names_that_lead_elsewhere_are_refused(publish: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    reader, folder = Reader(out), out / "step-1"
    publish(out, 1)
    for name in ("../run", "step-1/..", ""):
        (out / "latest").write_text(name)
        with pytest.raises(CorruptCheckpointError, match="expected the name of a folder"):
            reader.poll()
    (out / "latest").write_text("step-1\n")
    listed = digests.read(epath.Path(folder))
    file = next(name for name, entry in listed.items() if "a" in entry["tensors"])
    flip_bit(folder / file, listed[file]["tensors"]["a"][0])
    with pytest.raises(CorruptCheckpointError, match=f"{file}: 'a' differs from what was publ"):
        reader.poll()
    moved = {f"../step-1/{name}": entry for name, entry in listed.items()}
    (folder / digests.FILE).write_bytes(seals.encoded({"files": moved}))
    with pytest.raises(CorruptCheckpointError, match="is no file in the folder"):
        reader.poll()
    publish(out, 2)
    assert (polled(reader), reader.step) == (expected(2), 2)


# --- publications in a bucket ---


def test_latest_comes_last_and_equal_files_are_copied_within_the_bucket(
    gcs: FaultyServer, url: str, publish: Any
) -> None:
    publish(url, 1)
    with follower.Follower("run", url, FORM) as other:
        with pytest.raises(DirectoryError, match="found the run"):
            other.publish_due()
        other._folders._lease.hold()
        with pytest.raises(LeaseError, match="another program writes to"):
            publish(url, 2)
    stored: list[str] = []
    gcs.store.spoil = stored.append
    gcs.counts.clear()
    before = gcs.uploaded_bytes
    publish(url, 3)
    assert gcs.counts["copies"] == 2  # of "b", and of the index
    assert gcs.uploaded_bytes - before < state(3)["a"].nbytes + FROZEN["b"].nbytes
    prefix = url.removeprefix("gs://bucket/") + "/"
    kinds = [name.removeprefix(prefix).partition("/")[0] for name in stored]
    order = [kind for kind, _ in itertools.groupby(kinds)]
    assert order == [CONTROL, "step-3", CONTROL, "latest", CONTROL]
    assert f"{CONTROL}/lease" not in gcs.names(url)


def test_what_a_killed_program_left_in_a_bucket_is_never_seen_and_removed(
    gcs: FaultyServer, url: str, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "GRACE_SECS", 0)
    publish(url, 1)
    reader, copy_file, copied = Reader(url), copy._copy_file, list[Any]()
    assert polled(reader) == expected(1)

    def fail(source: epath.Path, target: epath.Path, *rest: Any) -> None:
        if copied:
            raise OSError(28, "killed")
        copied.append(target)
        copy_file(source, target, *rest)

    with monkeypatch.context() as killing, pytest.raises(DirectoryError, match="cannot publish in"):
        killing.setattr(copy, "_copy_file", fail)
        killing.setattr(copy, "_PARALLEL", 1)
        killing.setattr(PublishedFolders, "_finish", lambda self: None)
        publish(url, 2)
    assert [name for name in gcs.names(url) if name.startswith("step-2/")]
    assert polled(reader) == {}
    publish(url, 3)
    assert {name.split("/")[0] for name in gcs.names(url)} == {"step-3", "latest", CONTROL}
    assert polled(reader) == expected(3, "a", "z")


def test_another_publication_of_a_known_name_is_read(
    publish: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    reader, newer = Reader(out), expected(2, "a", "z")
    publish(out, 1)
    assert polled(reader) == expected(1)
    other = state(2)
    for folder in ("out", "run"):
        shutil.rmtree(tmp_path / folder)
    monkeypatch.setitem(globals(), "state", lambda step: other)
    publish(out, 1)
    assert polled(reader) == newer
    assert reader.poll() == {}


@pytest.mark.slow
def test_a_bucket_names_the_newest_after_a_failure_and_copies_no_damage(
    gcs: FaultyServer, url: str, publish: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(url, 1)
    (frozen,) = (
        n for n, e in digests.read(epath.Path(url) / "step-1").items() if "b" in e["tensors"]
    )
    damaged = epath.Path(url) / "step-1" / frozen
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    write = PublishedFolders._write

    def fails(self: PublishedFolders, path: epath.Path, content: bytes) -> None:
        if path.name == "latest":
            raise OSError(5, "one request failed")
        write(self, path, content)

    with (
        TorchaxCheckpointer(tmp_path / "run") as ckpt,
        follower.Follower(tmp_path / "run", url, FORM) as following,
    ):
        ckpt.save(2, state=state(2), force=True)
        ckpt.wait_until_finished()
        with monkeypatch.context() as failing, pytest.raises(DirectoryError, match="one request"):
            failing.setattr(PublishedFolders, "_write", fails)
            following.publish_due()
        assert following.publish_due() is None
    reader = Reader(url)
    assert (polled(reader), reader.step) == (expected(2), 2)
    with monkeypatch.context() as refusing:
        refusing.setattr(bucket, "copy", Mock(side_effect=PermissionError("403: no copies")))
        publish(url, 3)
    assert (polled(reader), reader.step) == (expected(3, "a", "z"), 3)
