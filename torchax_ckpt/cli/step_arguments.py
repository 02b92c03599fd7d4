"""Interprets command-line arguments that name the directory of a run or a step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from torchax_ckpt import policies
from torchax_ckpt.cli.exit_codes import UsageError
from torchax_ckpt.errors import DirectoryError, StepNotFoundError
from torchax_ckpt.policies.described import StepInfo
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import location


def existing(directory: str, *, read_only: bool = True) -> RunDirectory:
    """Returns the run in ``directory``, which must exist.

    Raises:
      UsageError: the path does not exist, is not a directory, is a step of a run, or has a scheme
        that is not supported.
      DirectoryError: the directory cannot be read at the moment.
    """
    if (found := _step_at(directory)) is not None:
        run, committed = found
        raise UsageError(
            f"{directory}: expected the directory of a run, found its step {committed.step}; "
            f"the run is {run.path}: give this directory"
        )
    return _run_at(directory, read_only=read_only)


def chosen(
    directory: str, step: int | None = None, *, read_only: bool = True
) -> tuple[RunDirectory, CommittedStep]:
    """Returns the run and the step that the command-line arguments name.

    ``runs/a 20`` and ``runs/a/20`` name step 20 of ``runs/a``; ``runs/a`` names its newest step.

    Raises:
      StepNotFoundError: there is no such step.
      UsageError: the directory does not exist, or contains no step.
    """
    if step is not None:
        run = existing(directory, read_only=read_only)
        return run, run.find(step)
    if (found := _step_at(directory, read_only=read_only)) is not None:
        return found
    run = _run_at(directory, read_only=read_only)
    return run, all_of(run)[-1]


def step_named(run: RunDirectory, text: str | None) -> CommittedStep:
    """Returns the step of a run that a text names.

    Args:
      run: the run.
      text: a number; ``best:loss`` for the step with the least metric ``loss``, or
        ``best:accuracy:max`` for the step with the greatest metric ``accuracy``; None for the
        newest step.

    Raises:
      StepNotFoundError: there is no such step.
      UsageError: the text has another form, the run has no steps, or no step has the metric.
    """
    if text is None:
        return all_of(run)[-1]
    if text.isdecimal():
        return run.find(int(text))
    kind, _, rest = text.partition(":")
    metric, _, mode = rest.partition(":")
    if kind != "best" or not metric or mode not in ("", "min", "max"):
        raise UsageError(
            f"STEP: expected a number, best:METRIC or best:METRIC:max, found {text!r:.80}"
        )
    rule = policies.BestN(n=1, metric=metric, mode="max" if mode == "max" else "min")
    sound = {s.step: s for s in all_of(run) if not run.verified.is_damaged(s)}
    ranked = rule.ranked(step_infos(run, sound.values()))
    if not ranked:
        raise UsageError(f"{run.path}: no step has the metric {metric!r:.80}")
    return sound[ranked[0].step]


def named_or_all(text: str) -> list[CommittedStep]:
    """Returns the step that a path such as ``runs/a/20`` names, or all steps of a directory.

    Raises:
      StepNotFoundError, UsageError: the path names neither a step nor a directory with steps.
    """
    found = _step_at(text)
    return all_of(_run_at(text)) if found is None else [found[1]]


def step_infos(run: RunDirectory, steps: Iterable[CommittedStep]) -> list[StepInfo]:
    """Returns what rules see of steps."""
    return [StepInfo(s.step, s.commit_timestamp_nsecs / 1e9, run.metrics(s)) for s in steps]


def all_of(run: RunDirectory) -> list[CommittedStep]:
    """Returns the steps of a run, oldest first.

    Raises:
      UsageError: the run has no steps.
    """
    if not (steps := run.steps()):
        raise UsageError(f"{run.path}: there are no checkpoints")
    return steps


def _step_at(text: str, *, read_only: bool = True) -> tuple[RunDirectory, CommittedStep] | None:
    """Returns the run and the step that a path names; None if the path does not name a step.

    Raises:
      StepNotFoundError: the path does not exist, but its parent is a run with other steps.
      DirectoryError: the path does not exist, and its parent cannot be read at the moment.
    """
    above, _, last = text.rstrip("/").rpartition("/")
    if not last.isdecimal():
        return None
    try:
        run = _run_at(above or ("/" if text.startswith("/") else "."), read_only=read_only)
    except UsageError:
        return None
    try:
        return run, run.find(int(last))
    except (StepNotFoundError, DirectoryError) as error:
        # A run may have a number as its name, such as 2026: a directory that is not a step of its
        # parent is a run. The parent of a run may be unreadable, for example a directory of all
        # jobs.
        with contextlib.suppress(UsageError):
            _run_at(text)
            return None
        if isinstance(error, DirectoryError) or run.steps():
            raise
        return None


def _run_at(directory: str, *, read_only: bool = True) -> RunDirectory:
    """Returns the run at a path, without checking whether the path is a step.

    Raises:
      UsageError: the path does not exist, is not a directory, or has a scheme that is not
        supported.
    """
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
