"""A run that begins anew is said, loudly if its name may be a typing mistake; a sweep is none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from etils import epath
from support.steps import save
from support.training import mlp

from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer
from torchax_ckpt.layout import names
from torchax_ckpt.saving.run import announce_new

READ_ONLY = CheckpointOptions(read_only=True)


@pytest.fixture(autouse=True)
def _default_level() -> Iterator[None]:
    """Sets the level that Python's logging has in a program which does not set one."""
    package, root = logging.getLogger("torchax_ckpt"), logging.getLogger()
    before = package.level, root.level
    package.setLevel(logging.NOTSET)
    root.setLevel(logging.WARNING)
    yield
    package.setLevel(before[0])
    root.setLevel(before[1])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("digits", "digit"),
        ("digits", "digitd"),
        ("digits", "diigts"),
        ("digits", "Digits"),
        ("größe-7", "gröse-7"),
        ("my-run", "my_run"),
        ("run2-digits", "run2-digts"),
    ],
)
def test_a_letter_of_a_word_may_be_mistyped(a: str, b: str) -> None:
    assert names.may_be_mistyped(a, b)
    assert names.may_be_mistyped(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("run1", "run2"),
        ("run", "run2"),
        ("run1", "run12"),
        ("lr_1", "lr_2"),
        ("seed-3", "seed-4"),
        ("lr=0.1", "lr=0.2"),
        ("lr=1.0", "lr=10"),
        ("run-1-11", "run-11-1"),
        ("lr_a", "lr_b"),
        ("gpt-l", "gpt-xl"),
        ("runA", "runB"),
        ("run", "runA"),
        ("v1", "v1"),
        ("digits", "letters"),
        ("digits", "dgitss"),
        ("", "a"),
    ],
)
def test_a_sweep_is_no_mistake(a: str, b: str) -> None:
    assert not names.may_be_mistyped(a, b)
    assert not names.may_be_mistyped(b, a)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_name_beside_that_of_a_run_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "digitx").mkdir()  # no run
    with TorchaxCheckpointer(tmp_path / "digits") as ckpt:
        ckpt.attach(mlp())
        assert warnings_of(caplog) == []
        save(ckpt, 1, 5)
    with TorchaxCheckpointer(tmp_path / "digit") as ckpt:
        assert ckpt.attach(mlp()) == 0
        [said] = warnings_of(caplog)
        assert said.startswith(f"new run in {tmp_path / 'digit'}: it has no step to resume from.")
        assert (
            f"The run {tmp_path / 'digits'}, whose name differs by one letter, has step 5" in said
        )
        save(ckpt, 1)
    caplog.clear()
    with TorchaxCheckpointer(tmp_path / "digit") as ckpt:
        assert ckpt.attach(mlp()) == 1
        save(ckpt, 2, of=None)
    with TorchaxCheckpointer(tmp_path / "digid", options=READ_ONLY) as ckpt:
        ckpt.attach(mlp())
    assert warnings_of(caplog) == []


def test_a_new_run_is_said_once_where_no_level_is_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed() -> list[str]:
        return [line for line in capsys.readouterr().err.splitlines() if "new run" in line]

    for name, attaches in (("a1", True), ("a2", False)):
        expected = [f"torchax_ckpt: new run in {tmp_path / name}: it has no step to resume from"]
        with TorchaxCheckpointer(tmp_path / name) as ckpt:
            if attaches:
                ckpt.attach(mlp())
                assert printed() == expected
            save(ckpt, 1, 2)
            assert printed() == ([] if attaches else expected)
        with TorchaxCheckpointer(tmp_path / name) as ckpt:
            if attaches:
                assert ckpt.attach(mlp()) == 2
            save(ckpt, 3)
            assert printed() == []
    for logger in (logging.getLogger("torchax_ckpt"), logging.getLogger()):
        for level in (logging.INFO, logging.ERROR):
            logger.setLevel(level)
            with TorchaxCheckpointer(tmp_path / "b") as ckpt:
                ckpt.attach(mlp())
            assert printed() == []
            logger.setLevel(logging.NOTSET if logger.name == "torchax_ckpt" else logging.WARNING)


def test_a_folder_that_cannot_be_listed_warns_of_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(names, "may_be_mistyped", refuse)
    (tmp_path / "other").mkdir()
    announce_new(epath.Path(tmp_path / "run"))
    assert warnings_of(caplog) == []
