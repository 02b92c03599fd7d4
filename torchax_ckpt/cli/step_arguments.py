"""Owns how a command finds the directory and the step it was given."""

from __future__ import annotations

import contextlib
import os

from torchax_ckpt.cli.exit_codes import UsageError
from torchax_ckpt.errors import DirectoryError, StepNotFoundError
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import location


def existing(directory: str, *, read_only: bool = True) -> RunDirectory:
    """The directory of a run that is there.

    Raises:
      UsageError: it is not there, no directory, a step's, or of a scheme that is not supported.
      DirectoryError: it cannot be read now.
    """
    if (one := _one(directory)) is not None:
        run, committed = one
        raise UsageError(
            f"{directory}: expected the directory of a run, found its step {committed.step}; "
            f"the run is {run.path}"
        )
    return _opened(directory, read_only=read_only)


def chosen(
    directory: str, step: int | None = None, *, read_only: bool = True
) -> tuple[RunDirectory, CommittedStep]:
    """The run and the step that arguments name.

    ``runs/a 20`` and ``runs/a/20`` name step 20 of ``runs/a``, and ``runs/a`` its newest one.

    Raises:
      StepNotFoundError: there is no such step.
      UsageError: there is none at all, or no such directory.
    """
    if step is not None:
        run = existing(directory, read_only=read_only)
        return run, run.find(step)
    if (one := _one(directory, read_only=read_only)) is not None:
        return one
    run = _opened(directory, read_only=read_only)
    return run, all_of(run)[-1]


def named_or_all(text: str) -> list[CommittedStep]:
    """The step that a path names, ``runs/a/20``; of a directory all of its steps.

    Raises:
      StepNotFoundError, UsageError: it names none.
    """
    one = _one(text)
    return all_of(_opened(text)) if one is None else [one[1]]


def all_of(run: RunDirectory) -> list[CommittedStep]:
    """The steps of a run that must have some, oldest first.

    Raises:
      UsageError: it has none.
    """
    if not (steps := run.steps()):
        raise UsageError(f"{run.path}: there are no checkpoints")
    return steps


def _one(text: str, *, read_only: bool = True) -> tuple[RunDirectory, CommittedStep] | None:
    """The step that a path names, and its run; None where the path may name a run.

    Raises:
      StepNotFoundError: nothing is there, but steps of other numbers are beside it.
    """
    above, _, last = text.rstrip("/").rpartition("/")
    if not last.isdecimal():
        return None
    try:
        run = _opened(above or ("/" if text.startswith("/") else "."), read_only=read_only)
    except UsageError:
        return None
    try:
        return run, run.find(int(last))
    except (StepNotFoundError, DirectoryError) as error:
        # A run may be called 2026: what is there, and no step of what is above it, is a run. What
        # is above it may be nobody's to read.
        with contextlib.suppress(UsageError):
            _opened(text)
            return None
        if isinstance(error, DirectoryError) or run.steps():
            raise
        return None


def _opened(directory: str, *, read_only: bool = True) -> RunDirectory:
    try:
        path = location.resolve(directory)
    except DirectoryError as error:
        raise UsageError(str(error)) from error
    if not location.is_bucket(path):
        with contextlib.suppress(PermissionError):
            try:
                os.listdir(path)
            except FileNotFoundError:
                raise UsageError(f"{directory}: no such directory") from None
            except NotADirectoryError:
                raise UsageError(f"{directory}: is not a directory") from None
    return RunDirectory(path, read_only=read_only)
