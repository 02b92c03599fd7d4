"""Owns how a command finds the directory and the step it was given."""

from __future__ import annotations

import contextlib
import os

from torchax_ckpt.cli.outcome import UsageError
from torchax_ckpt.errors import DirectoryError, StepNotFoundError
from torchax_ckpt.storage import location
from torchax_ckpt.storage.directory import CommittedStep, StepDirectory


def existing(directory: str, *, read_only: bool = True) -> StepDirectory:
    """The directory of a run that is there.

    Raises:
      UsageError: it is not there, no directory, or of a scheme that is not supported.
      DirectoryError: it cannot be read now.
    """
    try:
        path = location.resolve(directory)
    except DirectoryError as error:
        raise UsageError(str(error)) from error
    if not location.is_bucket(path):
        with contextlib.suppress(PermissionError):
            try:
                os.listdir(path)
            except (FileNotFoundError, NotADirectoryError):
                raise UsageError(f"{directory}: no such directory") from None
    return StepDirectory(path, read_only=read_only)


def chosen(directory: StepDirectory, step: int | None) -> CommittedStep:
    """The step of this number; None for the newest.

    Raises:
      StepNotFoundError: there is no such step.
      UsageError: there is none at all.
    """
    if step is not None:
        return directory.find(step)
    steps = directory.steps()
    if not steps:
        raise UsageError(f"{directory.path}: there are no checkpoints")
    return steps[-1]


def named(text: str) -> CommittedStep:
    """The step that a path names: ``runs/a/20`` step 20, ``runs/a`` the newest one.

    Raises:
      StepNotFoundError, UsageError: it names none.
    """
    return _one(text) or chosen(existing(text), None)


def named_or_all(text: str) -> list[CommittedStep]:
    """The step that a path names, ``runs/a/20``; of a directory all of its steps.

    Raises:
      StepNotFoundError, UsageError: it names none.
    """
    if (one := _one(text)) is not None:
        return [one]
    steps = existing(text).steps()
    if not steps:
        raise UsageError(f"{text}: there are no checkpoints")
    return steps


def _one(text: str) -> CommittedStep | None:
    above, _, last = text.rstrip("/").rpartition("/")
    if last.isdecimal():
        # A run may be called 2026: what has no such step above it is a run.
        with contextlib.suppress(StepNotFoundError, UsageError):
            return existing(above or ("/" if text.startswith("/") else ".")).find(int(last))
    return None
