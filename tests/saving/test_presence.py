"""A save takes over no database that has lost a file, whatever it still has of its index."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import training_state
from support.damage import halve
from support.linked import data_file, databases, files
from support.models import Tuned
from support.still import ALL, REUSE, assert_resumes, tuned

from torchax_ckpt import TorchaxCheckpointer, policies
from torchax_ckpt.errors import SaveError
from torchax_ckpt.storage.medium import local_medium

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
    model = tuned()
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
    assert_resumes(directory, 7, training_state(model))


def test_it_is_noticed_in_the_step_that_was_restored(directory: Path, caplog: Any) -> None:
    model = tuned()
    with opened(directory, model) as train:
        train(1, 2, 3, 4)
    with opened(directory, model) as train:
        data_file(directory, 4).unlink()
        with caplog.at_level(logging.WARNING, "torchax_ckpt"):
            train(5, 6, 7, 8)
    assert caplog.text.count(AGAIN) == 1
    assert not files(directory, 6) & files(directory, 4)
    for step in (7, 8):
        assert files(directory, step) & files(directory, step - 2)
    assert_resumes(directory, 8, training_state(model))


def test_it_is_noticed_in_what_is_kept_aside(directory: Path, caplog: Any) -> None:
    model = tuned()
    with opened(directory, model, preservation_policy=policies.LatestN(1)) as train:
        train(1, 2, 3)
        folder = directory / "unchanged" / "state" / databases(directory, 3)[0]
        max(folder.rglob("d/*"), key=lambda path: path.stat().st_size).unlink()
        with caplog.at_level(logging.WARNING, "torchax_ckpt"):
            train(4, 5, 6)
    assert caplog.text.count(AGAIN) == 1
    assert_resumes(directory, 6, training_state(model))


def test_a_change_in_between_costs_a_save(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save has looked at the files before; the next one writes all arrays."""
    model = tuned()
    link = local_medium.link_folder

    def change(*args: Any, **kwargs: Any) -> None:
        longer(data_file(directory, 3))
        link(*args, **kwargs)

    with opened(directory, model) as train:
        train(1, 2, 3, 4)
        monkeypatch.setattr(local_medium, "link_folder", change)
        with pytest.raises(SaveError, match="saving step 5 .* in place of .* before the step was"):
            train(5)
        monkeypatch.setattr(local_medium, "link_folder", link)
        train(6, 7, 8)
    assert not files(directory, 6) & files(directory, 4)
    assert files(directory, 8) & files(directory, 6)
    assert_resumes(directory, 8, training_state(model))


@pytest.mark.parametrize("lost", ["two files", "the folder"])
def test_many_lost_files_are_logged_once(lost: str, directory: Path, caplog: Any) -> None:
    model = tuned()
    with opened(directory, model) as train:
        train(1, 2, 3, 4)
        folder = directory / "3" / "state" / databases(directory, 3)[0]
        if lost == "the folder":
            shutil.rmtree(folder)
        else:
            data_file(directory, 3).unlink()
            halve(folder / "manifest.ocdbt")
        with caplog.at_level(logging.WARNING, "torchax_ckpt"):
            train(5, 6, 7)
    assert caplog.text.count(AGAIN) == 1
    found = " is gone" if lost == "the folder" else r"/\S+ .*, and 1 more"
    assert re.search(re.escape(str(folder)) + found + AGAIN, caplog.text)
    assert files(directory, 7) & files(directory, 5)
    assert_resumes(directory, 7, training_state(model))
