"""Verified steps: what was read back whole is known, survives every keep rule, and is reported."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tensorstore as ts
from support import training
from support.damage import damage, flip_bit
from support.stages import at, fail_at
from support.steps import save
from support.training import mlp

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
from torchax_ckpt.errors import CorruptCheckpointError, DirectoryError, SaveError, StepNotFoundError
from torchax_ckpt.storage.arrays import array_checks, read_arrays
from torchax_ckpt.storage.directory.committed_step import STATE, VERIFIED
from torchax_ckpt.storage.medium.local_medium import LocalMedium
from torchax_ckpt.stored import stored_step
from torchax_ckpt.stored.stored_step import StoredStep

LATEST = policies.LatestN(1)


def state(step: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(step).standard_normal((64, 64))}


def fill(directory: Path, *steps: int, **kwargs: Any) -> list[int]:
    """Saves the steps, and gives what is there then."""
    with TorchaxCheckpointer(directory, **kwargs) as ckpt:
        save(ckpt, *steps, of=state)
        return ckpt.all_steps()


def place_of(ckpt: TorchaxCheckpointer, leaf: str) -> tuple[Path, int, int]:
    """The file that holds a leaf's chunk in step 1, where it begins in it, and where it ends."""
    committed = ckpt._directory.candidates(1)[-1]
    key = array_checks.stored_key(StoredStep(committed).leaves[leaf].stack or leaf)
    store = {"driver": "ocdbt", "base": f"file://{committed.path / STATE}/", "path": f"{key}/"}
    array = ts.open({"driver": "zarr", "kvstore": store}, open=True).result()
    chunk = [0] * array.rank
    if array.rank == 3:  # a stack, and the leaf its second row
        chunk[0] = 1 // int((array.chunk_layout.read_chunk.shape or ())[0] or 1)
    found = read_arrays.place_of_chunk(committed.path / STATE, key, chunk)
    assert found is not None
    return Path(found.file), found.begin, found.end


def test_no_keep_rule_deletes_the_newest_verified_step(directory: Path) -> None:
    fill(directory, 1, 2, preservation_policy=policies.PreserveAll())
    with TorchaxCheckpointer(directory, preservation_policy=LATEST) as ckpt:
        assert ckpt.verify(1) == 1
        save(ckpt, 3, 4, of=state)
        assert ckpt.all_steps() == [1, 4]
    # A later program knows it from the step itself.
    assert fill(directory, 5, preservation_policy=LATEST) == [1, 5]
    with TorchaxCheckpointer(directory) as ckpt:
        assert ckpt.verify() == 5
    assert fill(directory, 6, preservation_policy=LATEST) == [5, 6]


def test_a_step_that_was_restored_is_verified(directory: Path) -> None:
    training.save(directory, mlp())
    before = sorted(directory.rglob("*"))
    with TorchaxCheckpointer(directory, preservation_policy=LATEST) as ckpt:
        assert ckpt.attach(mlp()) == 1
        assert sorted(directory.rglob("*")) == before  # so far it only reads
        ckpt.save(2, force=True)
        save(ckpt, 3, of=None)
        assert ckpt.all_steps() == [1, 3]
    assert (directory / "1" / VERIFIED).exists()
    assert not (directory / "3" / VERIFIED).exists()


@pytest.mark.parametrize(
    ("options", "rng"),
    [(CheckpointOptions(verify="never"), True), (CheckpointOptions(), False)],
    ids=["unchecked", "in part"],
)
def test_a_restore_that_did_not_check_everything_verifies_nothing(
    options: CheckpointOptions, rng: bool, directory: Path
) -> None:
    training.save(directory, mlp())
    with TorchaxCheckpointer(directory, options=options, preservation_policy=LATEST) as ckpt:
        ckpt.attach(mlp(), resume=False, rng=rng)
        report = ckpt.restore(1, strict=False)
        assert not report.is_verified
        save(ckpt, 2, of=None)
        assert ckpt.all_steps() == [2]


def test_steps_that_are_read_back_are_verified_as_they_come(directory: Path) -> None:
    options = CheckpointOptions(read_back=True)
    assert fill(directory, 1, 2, options=options, preservation_policy=LATEST) == [2]
    assert fill(directory, 3, 4, preservation_policy=LATEST) == [2, 4]


def test_a_verified_step_that_is_found_damaged_counts_no_more(directory: Path) -> None:
    fill(directory, 1, 2, preservation_policy=policies.PreserveAll())
    with TorchaxCheckpointer(directory, preservation_policy=LATEST) as ckpt:
        assert [ckpt.verify(step) for step in (1, 2)] == [1, 2]
        damage(directory / "2", state(2)["w"].tobytes()[:64])
        with pytest.raises(
            CorruptCheckpointError, match=r"Other steps in the directory: 1 \(verified\)\."
        ):
            ckpt.verify(2)
        assert not (directory / "2" / VERIFIED).exists()
        save(ckpt, 3, 4, of=state)
        assert ckpt.all_steps() == [1, 4]


def test_an_unmarked_step_is_verified(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(directory, 1)
    refuse = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(LocalMedium, "make_file", refuse)
    with TorchaxCheckpointer(directory, preservation_policy=LATEST) as ckpt:
        assert ckpt.verify(1) == 1
        save(ckpt, 2, 3, of=state)
        assert ckpt.all_steps() == [1, 3]


def test_a_step_that_is_deleted_while_it_is_read_is_not_called_damaged(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(directory, 1, 2, preservation_policy=policies.PreserveAll())
    read = stored_step.parse_manifest

    def delete_first(committed: Any) -> Any:
        shutil.rmtree(directory / str(committed.step))
        return read(committed)

    monkeypatch.setattr(stored_step, "parse_manifest", delete_first)
    ckpt = TorchaxCheckpointer(directory)
    with pytest.raises(StepNotFoundError, match="step 2 was deleted meanwhile"):
        ckpt.verify(2)
    with pytest.raises(StepNotFoundError, match="step 1 was deleted meanwhile"):
        ckpt.load()


def test_a_step_that_cannot_be_read_back_now_stays_until_the_next_one_is_durable(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Any, what: Any, *args: Any) -> None:
        if what:
            raise DirectoryError("Input/output error")

    def fails(ckpt: TorchaxCheckpointer, step: int) -> None:
        with monkeypatch.context() as failing, pytest.raises(SaveError, match="Input/output"):
            failing.setattr(StoredStep, "verify", fail)
            save(ckpt, step, of=state)

    caplog.set_level(logging.INFO, "torchax_ckpt")
    with TorchaxCheckpointer(directory, options=CheckpointOptions(read_back=True)) as ckpt:
        save(ckpt, 1, of=state)
        fails(ckpt, 2)
        assert ckpt.all_steps() == [1, 2]  # nobody knows that it is damaged
        mend = fail_at("set steps aside", OSError(5, "Input/output error"), number=2)
        ckpt.save(3, state=state(3), force=True)
        with pytest.raises(SaveError, match="step 3 is durable"):
            ckpt.wait_until_finished()
        mend()  # the rest is done by the next save
        save(ckpt, 4, of=state)
        assert ckpt.all_steps() == [1, 3, 4]
        assert "2: removing: its save failed" in caplog.text
        fails(ckpt, 5)
        ckpt._run.go_on_from(5)  # as after a restore of it
        save(ckpt, 6, of=state)
        assert ckpt.all_steps() == [4, 5, 6]
    assert {path.name for path in directory.iterdir()} == {"4", "5", "6", "events"}
    assert "abandoned" not in caplog.text


def test_a_step_that_does_not_read_back_is_deleted_and_its_save_has_failed(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(directory, 1)

    def damaging() -> None:
        (draft,) = directory.glob("writing-2-*")
        damage(draft, state(2)["w"].tobytes()[:64])

    no_more = at("write the arrays", damaging, when="after")
    ckpt = TorchaxCheckpointer(
        directory, options=CheckpointOptions(read_back=True), preservation_policy=LATEST
    )
    ckpt.save(2, state=state(2), force=True)
    with pytest.raises(SaveError, match=r"saving step 2 .*state/w: the stored bytes are not"):
        ckpt.wait_until_finished()
    assert ckpt.all_steps() == [1]
    mend = fail_at("delete a step", OSError(5, "I/O error"))
    ckpt.save(2, state=state(2), force=True)  # what is said is the same if it cannot be deleted
    with pytest.raises(SaveError, match=r"saving step 2 .*state/w: the stored bytes are not"):
        ckpt.wait_until_finished()
    mend()
    assert "2: this damaged step cannot be deleted: OSError: [Errno 5] I/O error" in caplog.text
    no_more()
    assert ckpt.save(3, state=state(3), force=True)
    ckpt.close()
    assert ckpt.all_steps() == [3]


@pytest.mark.parametrize(
    ("layout", "compression"), [("flat", False), ("auto", False), ("auto", True)]
)
def test_a_damaged_step_is_named_with_its_leaf_and_file(
    layout: Any, compression: bool, directory: Path
) -> None:
    options = CheckpointOptions(layout=layout, compression=compression)
    leaves = {f"layers.{i}.w": state(i)["w"] for i in range(3)}
    with TorchaxCheckpointer(directory, options=options) as ckpt:
        save(ckpt, 1, of=leaves)
        assert ckpt.verify() == 1
        if compression:
            # Bytes that do not unpack, rather than others: storage itself refuses them.
            file, start, end = place_of(ckpt, "state/layers.1.w")
            at = (start + end) // 2
            flip_bit(file, at)
            with pytest.raises(CorruptCheckpointError, match=r"state/layers\.\d\.w") as caught:
                ckpt.verify(1)
            assert caught.value.key_path in {f"state/{name}" for name in leaves}
        else:
            file, at = damage(directory / "1", leaves["layers.1.w"].tobytes()[:64])
            with pytest.raises(CorruptCheckpointError, match=r"state/layers\.1\.w") as caught:
                ckpt.verify(1)
            assert caught.value.key_path == "state/layers.1.w"
        assert Path(caught.value.file or "") == file
        place = re.search(r"(\S+), bytes (\d+) to (\d+)", str(caught.value))
        assert place is not None, str(caught.value)
        assert Path(place[1]) == file
        assert int(place[2]) <= at < int(place[3])


def test_only_reading_leaves_no_mark(directory: Path) -> None:
    fill(directory, 1)
    before = sorted(directory.rglob("*"))
    with TorchaxCheckpointer(directory, options=CheckpointOptions(read_only=True)) as ckpt:
        assert ckpt.verify() == 1
        with pytest.raises(StepNotFoundError):
            ckpt.verify(7)
    assert sorted(directory.rglob("*")) == before
