"""A save takes over no database that has lost a file, whatever it still has of its index."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from etils import epath
from support.compare import assert_trees_identical, training_state
from support.damage import halve
from support.linked import data_file, databases, files
from support.models import Tuned

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer, policies
from torchax_ckpt.errors import SaveError
from torchax_ckpt.layout.digests import Digests
from torchax_ckpt.layout.unchanged import Database
from torchax_ckpt.saving.unchanged import presence
from torchax_ckpt.saving.unchanged.known_databases import Content, KnownDatabase
from torchax_ckpt.saving.unchanged.reuse import Reuse
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import links, location
from torchax_ckpt.storage.writing.databases import File

REUSE = CheckpointOptions(reuse=True)
ALL = {"preservation_policy": policies.PreserveAll()}
AGAIN = ": the unchanged arrays are written again"


@contextlib.contextmanager
def opened(directory: Path, model: Tuned, **settings: Any) -> Iterator[Callable[..., None]]:
    """Resumes a run; yields a function that trains the head, and saves steps one by one."""
    with TorchaxCheckpointer(directory, options=REUSE, **{**ALL, **settings}) as ckpt:
        ckpt.attach(model)

        def train(*steps: int) -> None:
            for step in steps:
                with torch.no_grad():
                    model.head.weight.add_(step)
                ckpt.save(step, force=True)
                ckpt.wait_until_finished()

        yield train


def assert_resumes(directory: Path, step: int, model: Tuned) -> None:
    """Asserts that the newest step is the model, and that every byte of all steps can be read."""
    found = Tuned().to("jax")
    with TorchaxCheckpointer(directory, options=CheckpointOptions(read_only=True)) as ckpt:
        assert ckpt.attach(found) == step
        ckpt.verify(step)
    assert_trees_identical(training_state(found), training_state(model))


def longer(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"0")


@pytest.mark.parametrize(
    ("damage", "said"),
    [(os.unlink, "is gone"), (halve, "bytes in place of"), (longer, "bytes in place of")],
)
def test_a_lost_or_resized_data_file_is_noticed_by_the_save_that_would_take_it_over(
    damage: Callable[[Path], None], said: str, directory: Path, caplog: Any
) -> None:
    model = Tuned().to("jax")
    with opened(directory, model) as train:
        train(1, 2, 3, 4)
        damage(lost := data_file(directory, 3))
        with caplog.at_level(logging.WARNING, "torchax_ckpt"):
            train(5, 6, 7)
    assert caplog.text.count(AGAIN) == 1
    assert said in caplog.text
    assert str(lost) in caplog.text
    assert not files(directory, 5) & files(directory, 1)
    assert files(directory, 6) & files(directory, 4)
    assert files(directory, 7) & files(directory, 5)
    assert_resumes(directory, 7, model)


def test_it_is_noticed_in_the_step_that_the_run_was_restored_from(
    directory: Path, caplog: Any
) -> None:
    model = Tuned().to("jax")
    with opened(directory, model) as train:
        train(1, 2, 3, 4)
    with opened(directory, model) as train:
        data_file(directory, 4).unlink()
        with caplog.at_level(logging.WARNING, "torchax_ckpt"):
            train(5, 6, 7, 8)
    assert caplog.text.count(AGAIN) == 1
    assert files(directory, 5) & files(directory, 3)
    assert files(directory, 8) & files(directory, 6)
    assert_resumes(directory, 8, model)


def test_it_is_noticed_in_what_is_kept_aside(directory: Path, caplog: Any) -> None:
    model = Tuned().to("jax")
    with opened(directory, model, preservation_policy=policies.LatestN(1)) as train:
        train(1, 2, 3)
        folder = directory / "unchanged" / "state" / databases(directory, 3)[0]
        max(folder.rglob("d/*"), key=lambda path: path.stat().st_size).unlink()
        with caplog.at_level(logging.WARNING, "torchax_ckpt"):
            train(4, 5, 6)
    assert caplog.text.count(AGAIN) == 1
    assert_resumes(directory, 6, model)


def test_a_file_that_changes_while_it_is_taken_over_costs_the_save(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save has looked at the files before; the next one writes all arrays."""
    model = Tuned().to("jax")
    link = links.link_folder

    def change(*args: Any, **kwargs: Any) -> None:
        longer(data_file(directory, 3))
        link(*args, **kwargs)

    with opened(directory, model) as train:
        train(1, 2, 3, 4)
        monkeypatch.setattr(links, "link_folder", change)
        with pytest.raises(SaveError, match="saving step 5 .* in place of .* before the step was"):
            train(5)
        monkeypatch.setattr(links, "link_folder", link)
        train(6, 7, 8)
    assert not files(directory, 6) & files(directory, 4)
    assert files(directory, 8) & files(directory, 6)
    assert_resumes(directory, 8, model)


def test_what_one_of_several_files_leaves_behind_is_not_committed(tmp_path: Path) -> None:
    """If a database has several files, Orbax does not open all of them when it writes a step."""
    step = epath.Path(tmp_path)
    folder = step / "state" / "ocdbt.process_unchanged0x1"
    (folder / "d").mkdir(parents=True)
    sizes = {"manifest.ocdbt": File(3), "d/a": File(5), "d/b": File(0)}
    for name, file in sizes.items():
        (folder / name).write_bytes(bytes(file.size))
    stored = {"unchanged0": Database(0, ("w",), (1,))}
    content = Content(("w",), (1,), "float32", Digests((1,), bytes(8), bytes(16)))
    taken = KnownDatabase((1, 1), "unchanged7", {"w": content}, True, (5,), [sizes])
    assert presence.files_in(step, stored, [taken]) == {"unchanged0": [sizes]}
    (folder / "d" / "b").unlink()
    with pytest.raises(SaveError, match="x1/d/b is gone before the step was committed"):
        presence.files_in(step, stored, [taken])
    del sizes["d/b"]
    assert presence.files_in(step, stored, []) == {"unchanged0": [sizes]}
    (folder / "manifest.ocdbt").unlink()
    with pytest.raises(SaveError, match="x1 is gone before the step was committed"):
        presence.files_in(step, stored, [])


def test_many_lost_files_are_logged_once(tmp_path: Path, caplog: Any) -> None:
    """A file that no database wrote does not count, neither when it comes nor when it goes."""
    folder = tmp_path / "state" / "ocdbt.process_unchanged0"
    (folder / "d").mkdir(parents=True)
    sizes = {"manifest.ocdbt": File(3), "d/a": File(5), "d/b": File(7)}
    for name, file in (*sizes.items(), ("d/other", File(1))):
        (folder / name).write_bytes(bytes(file.size))
    step = epath.Path(tmp_path)
    known = KnownDatabase((1, 1), "unchanged0", {}, True, None, [sizes])
    assert presence.whole([(known, step)]) == [(known, step)]
    for name in ("a", "b"):
        (folder / "d" / name).unlink()
    assert presence.whole([(known, step)]) == []
    assert f"{folder}/d/a is gone, and 1 more{AGAIN}" in caplog.text


def test_only_failures_of_saves_that_copy_in_a_bucket_keep_saves_from_copying(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Where a save fails before it knows what it could copy, the service refused no copy."""
    reuse = Reuse(RunDirectory(directory), True, True, list, lambda *_: None, lambda leaves: None)
    monkeypatch.setattr(location, "is_bucket", lambda path: True)
    for takes_over in (True, False, False, True):
        reuse._takes_over = takes_over
        reuse.failed()
        reuse.failed()
    said = [re.findall(r"the next (\d+) saves write all", text) for text in caplog.messages]
    assert said == [["2"], ["4"]]


def test_files_of_others_beside_a_database_keep_no_save_from_linking(
    directory: Path, caplog: Any
) -> None:
    model = Tuned().to("jax")
    with opened(directory, model) as train:
        train(1, 2, 3, 4)
        data_file(directory, 3).unlink()
        kept = data_file(directory, 4)
        kept.with_name("other").write_bytes(b"")
        with caplog.at_level(logging.WARNING, "torchax_ckpt"):
            train(5, 6)
    assert caplog.text.count(AGAIN) == 1
    assert files(directory, 6) & files(directory, 4)
    assert_resumes(directory, 6, model)
