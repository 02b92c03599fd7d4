"""What a medium's errors mean, and what a failed save does to training."""

from __future__ import annotations

import errno
import logging
import os
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.stages import fail_at
from support.training import save_state

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.errors import CorruptCheckpointError, DirectoryError, SaveError
from torchax_ckpt.runtime import stages
from torchax_ckpt.storage.directory.committed_step import MANIFEST
from torchax_ckpt.storage.medium import seals, storage_errors

STATE = {"w": np.arange(3)}
TENSORSTORE_FULL = (
    'RESOURCE_EXHAUSTED: Error writing "w/c/0" in OCDBT database: Failed to write 9 bytes to file '
    "16: No space left on device [os_error_code='28']"
)


def wrapped(error: Exception) -> Exception:
    """As Orbax gives it: an error about something else, raised while handling this one."""
    outer = KeyError("Failed to load checkpointable: state due to incompatible handler")
    outer.__context__ = error
    return outer


MAY_PASS = [
    OSError(errno.EIO, "Input/output error"),
    PermissionError(errno.EACCES, "Permission denied"),
    OSError(errno.ESTALE, "Stale file handle"),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    TimeoutError(),
    OSError("Forbidden: b/bucket/o"),
    ValueError('PERMISSION_DENIED: Error opening "zarr3" driver: Permission denied'),
    ValueError("UNKNOWN: Failed to read [os_error_code='5']"),
    ValueError("ABORTED: All 32 retry attempts failed [http_response_code='503']"),
    ValueError("INVALID_ARGUMENT: Error reading an object: HTTP 400 [http_response_code='400']"),
    ValueError("FAILED_PRECONDITION: Error reading an object [http_response_code='412']"),
]
DAMAGE = [
    FileNotFoundError(errno.ENOENT, "gone"),
    FileNotFoundError("gs://bucket/run/1/manifest"),
    ValueError("DATA_LOSS: Error decoding manifest"),
    ValueError("OUT_OF_RANGE: Requested byte range [0, 9) is not valid for value of size 5"),
    ValueError("NOT_FOUND: Error reading a file"),
    ValueError("NOT_FOUND: Error reading an object [http_response_code='404']"),
    ValueError("OUT_OF_RANGE: Error reading an object [http_response_code='416']"),
    ValueError("Unterminated string starting at: line 1 column 538"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
]


@pytest.mark.parametrize("error", [*MAY_PASS, *DAMAGE], ids=str)
def test_what_may_pass_is_told_from_damage(error: Exception) -> None:
    assert storage_errors.is_unavailable(error) is (error in MAY_PASS)
    assert storage_errors.is_unavailable(wrapped(error)) is (error in MAY_PASS)


@pytest.mark.parametrize(
    ("error", "todo"),
    [
        (OSError(errno.ENOSPC, "full"), "free space"),
        (ValueError(TENSORSTORE_FULL), "free space"),
        (OSError(errno.EDQUOT, "quota"), "The quota is used up"),
        (OSError(errno.EROFS, "ro"), "mount it for writing"),
        (OSError(errno.EPERM, "no"), "check owner and mode"),
        (OSError(errno.ESTALE, "stale"), "mount it again"),
        (OSError(errno.EIO, "i/o"), "kernel's log"),
        (FileNotFoundError(errno.ENOENT, "gone"), "was removed"),
        (OSError(errno.EMFILE, "many"), "ulimit -n"),
    ],
    ids=str,
)
def test_errors_of_a_disk_say_what_to_do(error: Exception, todo: str) -> None:
    assert todo in storage_errors.advice(error)
    assert todo in storage_errors.advice(wrapped(error))
    assert storage_errors.kind(error) == storage_errors.kind(wrapped(error))


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "no answer from http://me:secret@host/x?key=secret again",
            "http://...@host/x?... again",
        ),
        ("`https://host:9000/?secret` is odd", "`https://host:9000/?...` is odd"),
        ("no file gs://bucket/a?b/5 at https://host/x", "gs://bucket/a?b/5 at https://host/x"),
    ],
)
def test_what_may_be_a_password_in_a_url_is_not_shown(said: str, shown: str) -> None:
    found = storage_errors.said(OSError(said))
    assert found.endswith(shown)
    assert "secret" not in found


def test_a_file_system_without_inodes_is_not_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    really = os.statvfs(tmp_path)
    free = {"f_files": 1000, "f_favail": 0, "f_bavail": 5}
    for changed, is_meant in (({}, True), ({"f_bavail": 0}, False), ({"f_files": 0}, False)):
        names = [name for name in dir(really) if name.startswith("f_")]
        found = {name: getattr(really, name) for name in names} | free | changed
        monkeypatch.setattr(os, "statvfs", lambda path, of=found: types.SimpleNamespace(**of))
        said = storage_errors.explained(error, tmp_path / "not" / "there")
        assert ("no free inodes" in said) == is_meant
        assert ("The disk is full" in said) != is_meant


Fail = Callable[["Exception | None"], None]


@pytest.fixture
def fail() -> Fail:
    """Has every write fail with this error, or none."""

    def set_error(error: Exception | None) -> None:
        stages.observers.clear()
        if error is not None:
            fail_at("write the arrays", error)

    return set_error


def save(ckpt: TorchaxCheckpointer, step: int) -> None:
    assert ckpt.save(step, state=STATE, force=True)
    ckpt._saver.wait()


def test_a_failure_is_said_once_then_when_it_changes_then_when_it_is_over(
    directory: Path, fail: Fail, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="torchax_ckpt")

    def told() -> int:
        return sum(f" to {directory}" in text for text in caplog.messages)

    ckpt = TorchaxCheckpointer(directory)
    fail(OSError(errno.ENOSPC, "No space left on device"))
    for step in range(1, 6):
        save(ckpt, step)
    assert told() == 1
    assert "saving step 1 to" in caplog.text
    assert "free space" in caplog.text
    fail(OSError(errno.EROFS, "Read-only file system"))
    save(ckpt, 6)
    save(ckpt, 7)
    assert told() == 2
    for step in (1, 6):
        with pytest.raises(SaveError) as caught:
            ckpt.check_for_errors()
        assert caught.value.step == step
    ckpt.check_for_errors()
    save(ckpt, 8)  # said before, but whoever asks again learns that it still fails
    with pytest.raises(SaveError, match="step 8"):
        ckpt.check_for_errors()
    fail(None)
    save(ckpt, 9)
    assert "works again after 8 failed saves" in caplog.text
    fail(OSError(errno.EROFS, "Read-only file system"))
    save(ckpt, 10)
    assert "saving step 10 to" in caplog.text  # a new failure
    with pytest.raises(SaveError):
        ckpt.close()
    assert ckpt.all_steps() == [9]


def test_what_cannot_be_looked_up_is_not_called_missing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = os.stat

    def refuse(path: Any, *args: Any, **kwargs: Any) -> Any:
        if re.search(f"{place}$", str(path)):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return stat(path, *args, **kwargs)

    with TorchaxCheckpointer(directory) as ckpt:
        save(ckpt, 1)
        for step, place in ((2, "/writing-2-[^/]*/orbax.checkpoint"), (3, f"{directory}")):
            with monkeypatch.context() as failing:
                failing.setattr(os, "stat", refuse)
                save(ckpt, step)
            with pytest.raises(SaveError, match=f"step {step} .*: OSError: .*put error: .*{place}"):
                ckpt.check_for_errors()
        save(ckpt, 4)
    assert ckpt.all_steps() == [1, 4]


@pytest.mark.parametrize("how", ["save", "steps"])
def test_on_save_error_raise_raises_at_the_next_call(how: str, directory: Path, fail: Fail) -> None:
    options = CheckpointOptions(on_save_error="raise")
    ckpt = TorchaxCheckpointer(directory, options=options)
    model = torch.nn.Linear(2, 2).to("jax")
    ckpt.attach(model)
    fail(OSError(errno.ENOSPC, "No space left on device"))
    if how == "save":
        assert ckpt.save(1, force=True)
        ckpt._saver.wait()
        with pytest.raises(SaveError, match=r"step 1 .*free space"):
            ckpt.save(2)
    else:
        done = []
        with pytest.raises(SaveError, match=r"step 1 .*free space"):
            for step in ckpt.steps(5):
                done.append(step)
                ckpt._saver.wait()
        assert done == [1, 2]
    with pytest.raises(SaveError):
        ckpt.close()


@pytest.mark.parametrize("is_passing", [True, False])
def test_resuming_goes_back_past_damage_but_not_past_what_cannot_be_read(
    is_passing: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 2).to("jax")
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(model)
        for step in (1, 2):
            ckpt.save(step, force=True)
    error = OSError(errno.EIO, "Input/output error") if is_passing else ValueError("DATA_LOSS: x")
    read = seals.read_sealed

    def read_or_fail(folder: Any) -> Any:
        if (folder.parent.name, folder.name) == ("2", MANIFEST):
            raise wrapped(error)
        return read(folder)

    monkeypatch.setattr(seals, "read_sealed", read_or_fail)
    reader = TorchaxCheckpointer(directory)
    if is_passing:
        expected = r"step 2 .*cannot be read now.*kernel's log.*Other steps in the directory: 1\.$"
        with pytest.raises(DirectoryError, match=expected):
            reader.attach(model)
    else:
        with pytest.warns(UserWarning, match="skipping an unreadable checkpoint"):
            assert reader.attach(model) == 1
        with pytest.raises(CorruptCheckpointError, match="DATA_LOSS"):
            reader.load(2)


def test_a_reader_neither_saves_nor_deletes(directory: Path) -> None:
    save_state(directory, STATE)
    reader = TorchaxCheckpointer(directory, options=CheckpointOptions(read_only=True))
    np.testing.assert_array_equal(reader.load()["w"], np.arange(3))
    with pytest.raises(DirectoryError, match="cannot be written: .*read_only=True"):
        reader.save(2, state=STATE)
    with pytest.raises(DirectoryError, match="cannot be written: .*read_only=True"):
        reader.delete(1)
    assert reader.all_steps() == [1]
