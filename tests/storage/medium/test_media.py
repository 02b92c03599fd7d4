"""A bucket does nothing as a disk does, and a run where nothing is renamed keeps its promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.compare import folders
from support.models import Tuned
from support.same_step import assert_same
from support.stages import at, fail_at
from support.steps import save, state

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
from torchax_ckpt.errors import SaveError
from torchax_ckpt.storage.directory import commit_record
from torchax_ckpt.storage.directory.commit_record import MARK
from torchax_ckpt.storage.medium.bucket_medium import BEGUN, BucketMedium, BucketRecord
from torchax_ckpt.storage.medium.compare_and_swap import AtomicRecord
from torchax_ckpt.storage.medium.local_medium import LocalMedium

pytest_plugins = ("support.folder_bucket",)

# What both do by other methods, or in memory.
COMMON = {"names_in", "keep", "let_go", "unused"}
ALL = {"preservation_policy": policies.PreserveAll()}


def verbs(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("__")}


def test_a_bucket_has_a_way_of_its_own_for_what_a_disk_does_by_the_system() -> None:
    assert verbs(LocalMedium) - verbs(BucketMedium) == COMMON
    in_a_file = {"_created_by_link", "_locked"}  # used by those that a bucket overrides
    assert verbs(AtomicRecord) - verbs(BucketRecord) == in_a_file


@pytest.fixture
def place(folder_bucket: Path) -> Path:
    return folder_bucket / "run"


def test_a_step_is_written_under_its_name_and_is_one_once_it_has_its_mark(
    place: Path, directory: Path
) -> None:
    def look() -> None:
        seen.append((folders(place), (place / "1" / MARK).exists(), ckpt.all_steps()))

    seen: list[tuple[set[str], bool, list[int]]] = []
    end = at("mark the step", look)
    with TorchaxCheckpointer(place) as ckpt:
        ckpt.attach(rng=False)
        save(ckpt, 1)
    end()
    assert seen == [({"1"}, False, [])]
    assert ckpt.all_steps() == [1]
    with TorchaxCheckpointer(directory) as ckpt:
        ckpt.attach(rng=False)
        save(ckpt, 1)
    assert_same(place / "1", directory / "1")


def fail_after_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = commit_record.time_or_none
    monkeypatch.setattr(commit_record, "time_or_none", lambda path: mark(path) and 1 / 0)


@pytest.mark.parametrize(
    "fail",
    [
        lambda patch: fail_at("complete the step", OSError("gone"), number=1),
        fail_after_the_mark,
    ],
    ids=["before the mark", "after the mark"],
)
def test_a_failed_save_is_no_step_and_its_name_is_not_used_again(
    place: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[[pytest.MonkeyPatch], object]
) -> None:
    with TorchaxCheckpointer(place, **ALL) as ckpt:
        with monkeypatch.context() as patch:
            fail(patch)
            with pytest.raises(SaveError):
                save(ckpt, 1)
        assert not (place / "1" / MARK).exists()
        assert ckpt.all_steps() == []
        save(ckpt, 1)
        assert ckpt.all_steps() == [1]
    assert (place / "incoming-1" / MARK).exists()
    assert [path.name for path in (place / "1").iterdir()] == [BEGUN]
    with TorchaxCheckpointer(place) as ckpt:
        assert ckpt.attach(rng=False) == 1


def test_a_mark_whose_answer_was_lost_and_that_arrives_late_makes_no_step(place: Path) -> None:
    mark = place / "1" / MARK

    def lose() -> None:
        content.append(mark.read_bytes())
        mark.unlink()
        raise OSError("no answer")

    def arrive() -> None:
        if content:
            mark.write_bytes(content.pop())

    content: list[bytes] = []
    with TorchaxCheckpointer(place, **ALL) as ckpt:
        at("mark the step", lose, when="after", number=1)
        at("recover the directory", arrive)
        with pytest.raises(SaveError):
            save(ckpt, 1)
        save(ckpt, 2)
        assert ckpt.all_steps() == [2]
    assert not content
    assert not mark.exists()
    with TorchaxCheckpointer(place) as ckpt:
        assert ckpt.attach(rng=False) == 2
        assert ckpt.all_steps() == [2]


def test_an_abandoned_step_is_set_aside_and_a_deleted_one_is_gone(place: Path) -> None:
    with TorchaxCheckpointer(place, **ALL) as ckpt:
        ckpt.attach(rng=False)
        save(ckpt, 1, 2, 3)
        ckpt.restore(1, strict=False)
        save(ckpt, 2, of=lambda step: state(20))
        ckpt.delete(1)
        assert ckpt.all_steps() == [2]
        assert ckpt.load(2)["w"][0] == 20
    assert folders(place) == {"incoming-2", "abandoned-2", "abandoned-3"}
    assert all((place / name / MARK).exists() for name in folders(place))


def test_reused_files_are_copies(place: Path) -> None:
    with TorchaxCheckpointer(place, options=CheckpointOptions(reuse=True), **ALL) as ckpt:
        ckpt.attach(Tuned().to("jax"))
        for step in (1, 2):
            ckpt.save(step, force=True)
    data = [
        {
            path.name: path.stat()
            for path in (place / step / "state").glob("ocdbt.process_unchanged*/d/*")
        }
        for step in ("1", "2")
    ]
    assert data[0].keys() == data[1].keys() != set()
    assert all(status.st_nlink == 1 for each in data for status in each.values())
    with TorchaxCheckpointer(place) as ckpt:
        assert ckpt.attach(Tuned().to("jax")) == 2
