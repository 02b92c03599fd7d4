"""Buckets that FUSE shows as folders are read, not written; other mounts are used as they are."""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from etils import epath
from support.commands import run
from support.compare import entries
from support.training import save_state

from torchax_ckpt import CheckpointOptions, LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.storage.medium import permissions

STATE = {"w": np.arange(3)}
ROOT = "1 0 254:0 / / rw,relatime - ext4 /dev/vda rw,discard"
OPTIONS = "rw,user_id=0,group_id=0,default_permissions,allow_other"

Mounted = Callable[..., None]


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mounted:
    """Has the kernel list mounts below the root: "NUMBER PARENT ROOT POINT TYPE SOURCE OPTIONS"."""
    table = tmp_path / "mountinfo"
    monkeypatch.setattr(permissions, "_MOUNTINFO", table)

    def mount(*described: str) -> None:
        lines = [ROOT]
        for line in described:
            number, parent, root, point, kind, source, *options = line.split(" ")
            lines.append(
                f"{number} {parent} 0:{number} {root} {point} rw,nosuid,nodev,relatime "
                f"shared:{number} master:2 - {kind} {source} {(*options, OPTIONS)[0]}"
            )
        table.write_text("\n".join(lines) + "\n")

    return mount


def refusal(path: str | Path) -> str | None:
    """The URL that the error names; None if the path may be written."""
    try:
        permissions.refuse_object_store(path)
    except DirectoryError as error:
        return re.findall(r"Give (gs://\S+) \(", str(error))[0]
    return None


@pytest.mark.parametrize(
    ("line", "path", "url"),
    [
        ("2 1 / /mnt/b fuse.gcsfuse my-bucket", "/mnt/b", "gs://my-bucket"),
        ("2 1 / /mnt/b fuse.gcsfuse my-bucket", "/mnt/bucket/runs", None),
        # All buckets, as on Vertex AI; a folder of a bucket, bound into a container.
        ("2 1 / /gcs fuse.gcsfuse gcsfuse", "/gcs/my-bucket/runs/a", "gs://my-bucket/runs/a"),
        ("2 1 /team/x /data fuse.gcsfuse my-bucket", "/data/a", "gs://my-bucket/team/x/a"),
        ("2 1 / /my\\040data\\134 fuse.gcsfuse b", "/my data\\/a", "gs://b/a"),
        ("2 1 / /mnt/g fuse.s3fs bucket", "/mnt/g/a", "gs://bucket/prefix"),
        ("2 1 / /mnt/g fuse.rclone bucket", "/mnt/g/a", "gs://bucket/prefix"),
        ("2 1 / /mnt/g fuse.goofys bucket", "/mnt/g/a", "gs://bucket/prefix"),
        ("2 1 / /mnt/g fuse.geesefs bucket", "/mnt/g/a", "gs://bucket/prefix"),
        ("2 1 / /mnt/g fuse.ossfs ossfs", "/mnt/g/a", "gs://bucket/prefix"),
        ("2 1 / /mnt/g fuse blobfuse2", "/mnt/g/a", "gs://bucket/prefix"),
        ("2 1 / /mnt/g fuse mountpoint-s3", "/mnt/g/a", "gs://bucket/prefix"),
        *(
            (f"2 1 / /mnt/g {mount}", "/mnt/g/a", "gs://bucket/prefix")
            for name in (
                *("blobfuse", "blobfuse2", "mountpoint-s3", "mount-s3", "cosfs", "obsfs"),
                *("ossfs2", "tigrisfs", "s3fs", "geesefs"),
            )
            for mount in (f"fuse.{name} b", f"fuse {name}", f"fuse.other {name}")
        ),
        ("2 1 / /mnt/g ext4 mountpoint-s3", "/mnt/g/a", None),
        ("2 1 / /mnt/g nfs s3fs", "/mnt/g/a", None),
        ("2 1 / /jfs fuse.juicefs JuiceFS:myjfs", "/jfs/a", None),
        ("2 1 / /d fuse ", "/d/a", None),
    ],
)
def test_a_mounted_bucket_is_known_by_its_type_and_named_by_its_url(
    line: str, path: str, url: str | None, mounted: Mounted
) -> None:
    mounted(line)
    assert refusal(path) == url


GCS = "fuse.gcsfuse bucket"


@pytest.mark.parametrize(
    ("table", "is_refused"),
    [
        (["2 1 / /a fuse.gcsfuse b", "3 2 / /a/run tmpfs t"], False),  # within
        (["3 2 / /a/run fuse.gcsfuse b", "2 1 / /a tmpfs t"], True),  # within, in another order
        (["2 1 / /a/run tmpfs t", "3 1 / /a/run fuse.gcsfuse b"], True),  # over it, later
        (["2 1 / /a/run fuse.gcsfuse b", "3 1 / /a tmpfs t"], False),  # hidden
    ],
)
def test_the_mount_of_a_path_decides(table: list[str], is_refused: bool, mounted: Mounted) -> None:
    mounted(*table)
    assert (refusal("/a/run/1") is not None) == is_refused


def test_a_link_leads_to_a_mount_and_no_list_of_mounts_refuses_nothing(
    tmp_path: Path, mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, link = tmp_path / "bucket", tmp_path / "link"
    bucket.mkdir()
    link.symlink_to(bucket)
    mounted(f"2 1 / {bucket} {GCS}")
    assert refusal(link / "not" / "there") == "gs://bucket/not/there"
    for text in (b"", b"\xff\n", b"1 2 3\n\n"):
        (tmp_path / "mountinfo").write_bytes(text)
        assert refusal(bucket) is None
    monkeypatch.setattr(permissions, "_MOUNTINFO", tmp_path / "missing")
    assert refusal(bucket) is None
    monkeypatch.undo()
    assert permissions._mount_of(tmp_path) is not None


def test_a_mounted_bucket_is_refused_at_attach_and_at_every_write_and_read_all_the_same(
    directory: Path, tmp_path: Path, mounted: Mounted
) -> None:
    mounted()
    with TorchaxCheckpointer(directory) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state=STATE, force=True)
    mounted(f"2 1 / {directory} {GCS}")
    before = entries(directory)
    with TorchaxCheckpointer(directory) as ckpt:
        for write in (
            lambda: ckpt.attach(),
            lambda: ckpt.save(3, state=STATE),
            lambda: ckpt.delete(1),
        ):
            with pytest.raises(DirectoryError, match="Give gs://bucket "):
                write()
        assert ckpt.load()["w"].tolist() == [0, 1, 2]
    refused = run(
        "prune", directory, "--policy", "LatestN(1)", "--delete", code=exit_codes.UNAVAILABLE
    )
    assert "Give gs://bucket " in refused
    assert entries(directory) == before
    with TorchaxCheckpointer(directory, options=CheckpointOptions(read_only=True)) as reader:
        assert reader.attach() == 2
    # A local tier is a directory to write, too.
    local = LocalTier(str(directory))
    ckpt = TorchaxCheckpointer(tmp_path / "durable", local=local)
    with pytest.raises(DirectoryError, match="Give gs://bucket "):
        ckpt.attach()
    ckpt.close()
    assert not (tmp_path / "durable").exists()


def test_nothing_is_published_on_a_mounted_bucket(
    directory: Path, tmp_path: Path, mounted: Mounted
) -> None:
    mounted()
    save_state(directory, STATE)
    out = tmp_path / "published"
    mounted(f"2 1 / {out} {GCS}")
    words = ("follow", directory, out, "--format", "safetensors", "--at", "state", "--once")
    assert "Give gs://bucket " in run(*words, code=exit_codes.UNAVAILABLE)
    assert not out.exists()
    mounted()
    run(*words)
    assert (out / "step-1").is_dir()


NO_LOCKS = "rw,vers=3,rsize=1048576,hard,nolock,proto=tcp,port=39173,local_lock=all,addr=127.0.0.1"


@pytest.mark.parametrize(
    ("mount", "is_refused"),
    [
        (f"nfs 127.0.0.1:/ {NO_LOCKS}", True),
        (f"nfs localhost:/ {NO_LOCKS}", True),
        ("fuse hf-mount", True),
        ("fuse.hf-mount x", True),
        (f"nfs 10.0.0.2:/ {NO_LOCKS}", False),  # a file server
        (f"nfs 127.0.0.1:/export {NO_LOCKS}", False),  # the kernel's server on this host
        ("nfs 127.0.0.1:/ rw,vers=3,hard,proto=tcp,local_lock=none,addr=127.0.0.1", False),
        # A tunnel to a file server, as that of Amazon's efs-utils.
        ("nfs4 127.0.0.1:/ rw,vers=4.1,hard,proto=tcp,port=20049,local_lock=none", False),
    ],
)
def test_a_bucket_mounted_by_hf_mount_is_refused(
    mount: str, is_refused: bool, tmp_path: Path, mounted: Mounted
) -> None:
    mounted(f"2 1 / {tmp_path} {mount}")
    ckpt = TorchaxCheckpointer(tmp_path / "run")
    if is_refused:
        with pytest.raises(DirectoryError, match="bucket mounted by hf-mount.*last of two writers"):
            ckpt.save(1, state=STATE)
    else:
        assert ckpt.save(1, state=STATE)
    ckpt.close()
    assert (tmp_path / "run").exists() != is_refused


@pytest.mark.parametrize(
    "kind",
    [
        "fuse.drive drive",
        pytest.param("fuse drive", marks=pytest.mark.slow),
        pytest.param("fuse.google-drive-ocamlfuse g", marks=pytest.mark.slow),
    ],
)
def test_of_google_drive_is_said_when_its_steps_are_durable_and_that_it_has_no_links(
    kind: str,
    directory: Path,
    mounted: Mounted,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mounted(f"2 1 / {directory.parent} {kind}")
    monkeypatch.setattr(os, "link", refusing(errno.ENOSYS)(os.link))
    frozen = jax.numpy.ones((512, 513))
    ckpt = TorchaxCheckpointer(
        directory,
        preservation_policy=policies.PreserveAll(),
        options=CheckpointOptions(reuse=["state/frozen"]),
    )
    with caplog.at_level("INFO", "torchax_ckpt"):
        with pytest.warns(UserWarning, match=r"Google Drive.*later.*flush_and_unmount\(\)"):
            ckpt.save(1, state={"frozen": frozen, "step": 1}, force=True)
        for step in range(2, 4):
            ckpt.wait_until_finished()
            ckpt.save(step, state={"frozen": frozen, "step": step}, force=True)
        ckpt.close()
    assert "as copies, because this file system has no hard links" in caplog.text
    assert "as hard links" not in caplog.text


def copying(rename: Any) -> Any:
    """A rename that copies each file and then deletes it."""

    def copy(old: Path, new: Path) -> None:
        new.mkdir()
        for file in old.iterdir():
            (new / file.name).write_bytes(file.read_bytes())
        for file in old.iterdir():
            file.unlink()

    return copy


def refusing(number: int) -> Callable[[Any], Any]:
    return lambda really: Mock(side_effect=OSError(number, os.strerror(number)))


@pytest.mark.parametrize(
    ("kind", "where", "name", "changed", "expected"),
    [
        ("fuse", os, "sep", lambda really: really, None),
        ("fuse", pathlib.Path, "rename", copying, "the rename of a folder makes new files"),
        ("fuse", os, "link", refusing(errno.ENOSYS), "it has no hard links"),
        ("fuse", fcntl, "flock", refusing(errno.ENOLCK), r"it has no locks \(No locks available"),
        ("fuse", fcntl, "flock", lambda really: lambda *args: None, "its locks exclude nobody"),
        ("fuse.new-bucket", os, "link", refusing(errno.ENOSYS), "it has no hard links"),
        ("fuseblk", os, "link", refusing(errno.ENOSYS), None),
        ("ext4", os, "link", refusing(errno.ENOSYS), None),
        ("nfs4", os, "link", refusing(errno.ENOSYS), None),
    ],
)
def test_a_file_system_of_fuse_is_probed(
    kind: str,
    where: Any,
    name: str,
    changed: Callable[[Any], Any],
    expected: str | None,
    tmp_path: Path,
    mounted: Mounted,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted(f"2 1 / {disk} {kind} my-bucket")
    monkeypatch.setattr(where, name, changed(getattr(where, name)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        permissions.prove_writable(disk)
    monkeypatch.undo()
    assert [*disk.iterdir()] == []
    assert len(caught) == (expected is not None)
    if expected is not None:
        assert re.search(
            f"type {kind}, source my-bucket.*{expected}.*give gs://", str(caught[0].message)
        )


def test_the_first_save_probes(directory: Path, mounted: Mounted) -> None:
    directory.mkdir()
    mounted(f"2 1 / {directory} fuse my-bucket")
    with pytest.MonkeyPatch.context() as patch, TorchaxCheckpointer(directory) as ckpt:
        patch.setattr(os, "link", refusing(errno.EPERM)(os.link))
        with pytest.warns(UserWarning, match="it has no hard links"):
            ckpt.save(1, state=STATE)


@pytest.mark.parametrize("mount", ["fuse my-bucket", "fuse.juicefs JuiceFS:jfs", "ext4 /dev/vda"])
def test_what_lies_where_colab_puts_drive_is_what_its_mount_says(
    mount: str, mounted: Mounted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os.path, "realpath", {tmp_path: "/content/drive/MyDrive"}.__getitem__)
    mounted(f"2 1 / /content/drive {mount}")
    monkeypatch.setattr(os, "link", refusing(errno.ENOSYS)(os.link))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        permissions.prove_writable(epath.Path(tmp_path))
    texts = ["it has no hard links" in str(warning.message) for warning in caught]
    assert texts == [True] * mount.startswith("fuse")
    (tmp_path / "file").write_text("kept")
    permissions.empty_for_trash(epath.Path(tmp_path))
    assert (tmp_path / "file").read_text() == "kept"
