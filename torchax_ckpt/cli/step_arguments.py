"""The arguments that several commands have: runs, steps, sizes and times, as users type them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Annotated

import typer

from torchax_ckpt.cli.exit_codes import UsageError
from torchax_ckpt.errors import DirectoryError, StepNotFoundError
from torchax_ckpt.layout import names
from torchax_ckpt.policies.described import StepInfo
from torchax_ckpt.policies.preservation import ranking
from torchax_ckpt.storage.directory import commit_record
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import location

Directory = Annotated[
    str, typer.Argument(metavar="DIRECTORY", help="A run's directory, or gs://bucket/prefix.")
]
RunOrStep = Annotated[
    str,
    typer.Argument(
        metavar="DIRECTORY", help="A run's directory, or gs://bucket/prefix; or DIRECTORY/STEP."
    ),
]
Step = Annotated[
    int | None, typer.Argument(metavar="STEP", min=0, help="Number of the step; default: newest.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_MAX_RUNS = 20
_NUMBER = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:e[0-9]{1,2})?) ?([a-z]*)", re.IGNORECASE)
_SIZES = {
    f"{prefix}{binary}{unit}": (1024 if binary else 1000) ** power
    for power, prefix in enumerate(("", "k", "m", "g", "t"))
    for binary in ("", "i")
    for unit in ("", "b")
}
_TIMES = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def existing(directory: str, *, read_only: bool = True) -> RunDirectory:
    """Returns the run in ``directory``; UsageError if it is none, such as one of a run's steps."""
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
    """Returns the run and step that arguments name: ``runs/a 20``, ``runs/a/20``, or the newest."""
    if step is None and (found := _step_at(directory, read_only=read_only)) is not None:
        return found
    run = existing(directory, read_only=read_only)
    try:
        return run, run.candidates(step)[-1]
    except StepNotFoundError as error:
        if not run.steps() and (runs := runs_in(run)):
            raise UsageError(f"{error}. {runs_text(runs)}. Give one of them") from error
        raise


def runs_in(run: RunDirectory) -> dict[str, int]:
    """Returns name -> newest step of the runs in a folder that is perhaps no run itself."""
    found = {}
    for child in run.path.iterdir() if run.path.exists() else ():
        with contextlib.suppress(PermissionError):  # a folder of somebody else
            if (step := commit_record.newest_in(child)) is not None:
                found[child.name] = step
    return dict(sorted(found.items()))


def runs_text(runs: Mapping[str, int]) -> str:
    """Returns a text that names the runs in a folder, with their newest steps."""
    named = [f"{name} (newest step {step})" for name, step in runs.items()]
    more = f" and {len(named) - _MAX_RUNS} more" if len(named) > _MAX_RUNS else ""
    return f"The runs in this folder: {', '.join(named[:_MAX_RUNS])}{more}"


def step_named(run: RunDirectory, text: str | None) -> CommittedStep:
    """Returns the step that a number, ``best:loss`` or ``best:loss:max`` names; or the newest."""
    if text is None or text.isdecimal():
        return run.candidates(None if text is None else int(text))[-1]
    kind, _, rest = text.partition(":")
    rule = ranking(rest) if kind == "best" else None
    if rule is None:
        raise UsageError(
            f"STEP: expected a number, best:METRIC or best:METRIC:max, found {text!r:.80}"
        )
    sound = {s.step: s for s in run.candidates(None) if not run.verified.is_damaged(s)}
    ranked = rule.ranked(step_infos(run, sound.values()))
    if not ranked:
        known = {name for info in step_infos(run, sound.values()) for name in info.metrics or {}}
        like = names.nearest(rule.metric, known)
        raise UsageError(f"{run.path}: no step has the metric {rule.metric!r:.80}{like}")
    return sound[ranked[0].step]


def named_or_all(text: str) -> list[CommittedStep]:
    """Returns the step that a path such as ``runs/a/20`` names, or all steps of a directory."""
    found = _step_at(text)
    return _run_at(text).candidates(None) if found is None else [found[1]]


def step_infos(run: RunDirectory, steps: Iterable[CommittedStep]) -> list[StepInfo]:
    """Returns what rules see of steps."""
    return [StepInfo(s.step, s.commit_timestamp_nsecs / 1e9, run.metrics(s)) for s in steps]


def _step_at(text: str, *, read_only: bool = True) -> tuple[RunDirectory, CommittedStep] | None:
    """Returns the run and the step that a path names; None if the path does not name a step."""
    above, _, last = text.rstrip("/").rpartition("/")
    if not last.isdecimal():
        return None
    try:
        run = _run_at(above or ("/" if text.startswith("/") else "."), read_only=read_only)
    except UsageError:
        return None
    try:
        return run, run.candidates(int(last))[-1]
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
    """Returns the run at a path, without checking whether the path is a step."""
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


def parsed_size(text: str, option: str) -> int:
    """Parses a size such as ``5GB``, ``500 MiB`` or a plain number of bytes, at least one byte."""
    nbytes = int(_parsed(text, option, _SIZES, "a size such as 5GB or 500MiB"))
    if nbytes < 1:
        raise UsageError(f"{option}: expected a size of at least one byte, found {text!r}")
    return nbytes


def parsed_secs(text: str, option: str) -> float:
    """Parses a time such as ``90``, ``5min`` or ``12h`` into seconds."""
    return _parsed(text, option, _TIMES, "a time such as 90, 90s, 5min, 12h or 365d")


def parsed_count(text: str, option: str) -> int:
    """Parses a number such as ``70B`` or ``124e6``."""
    return int(_parsed(text, option, _COUNTS, "a number such as 70B or 124e6"))


def _parsed(text: str, option: str, units: Mapping[str, float], expected: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    unit = units.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UsageError(f"{option}: expected {expected}, found {text!r}")
    return float(match[1].replace("_", "")) * unit
