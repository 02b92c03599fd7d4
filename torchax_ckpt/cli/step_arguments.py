"""The arguments that several commands have: runs, steps, sizes and times, as users type them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from etils import epath

from torchax_ckpt.cli.exit_codes import UsageError
from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.runtime.step_numbers import is_name
from torchax_ckpt.storage.directory import given_step
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import location, medium
from torchax_ckpt.stored import named_steps

Directory = Annotated[
    str, typer.Argument(metavar="DIRECTORY", help="A run's directory, also gs:// or s3://.")
]
RunOrStep = Annotated[
    str,
    typer.Argument(
        metavar="DIRECTORY", help="A run's directory, also gs:// or s3://; or DIRECTORY/STEP."
    ),
]
Step = Annotated[
    str | None,
    typer.Argument(
        metavar="STEP", help="Number, latest, best:loss, or best:accuracy:max; default: latest."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# A step's number; and a directory with the name of a step after it, which a metric may end.
_DIGITS = re.compile("[0-9]{1,19}")
_NAMED = re.compile("(.+?)/+(latest/*|best:.+)")
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
    """Returns the run in ``directory``; UsageError if it is no run, but a step, for example."""
    run = run_at(directory, read_only=read_only, reads_step=False)
    with as_usage_error():
        run.require_run()
    return run


def run_to_write(directory: str) -> RunDirectory:
    """Returns the run in ``directory``, which need not exist yet; UsageError if it is no run."""
    run = RunDirectory(folder_path(directory))
    with as_usage_error():
        run.require_run()
    return run


def chosen(
    directory: str, step: str | None = None, *, read_only: bool = True
) -> tuple[RunDirectory, CommittedStep]:
    """Returns the run and step that arguments name: ``runs/a 20``, ``runs/a/20``, or the newest.

    In place of 20 there may be ``latest``, ``best:loss`` or ``best:loss:max``.
    """
    if step is None:
        directory, step = parted(directory)
    run = (run_at if step is None else existing)(directory, read_only=read_only)
    return run, step_named(run, step)


def parted(text: str) -> tuple[str, str | None]:
    """Returns ``runs/a`` and ``best:loss`` for ``runs/a/best:loss``; else the text and None."""
    named = _NAMED.fullmatch(text)
    if named is None or path_of(text, as_mirror=True).exists():  # also a run may be called latest
        return text, None
    return named[1], named[2].rstrip("/")


def step_named(run: RunDirectory, text: str | None) -> CommittedStep:
    """Returns the step that a number, ``latest`` or ``best:loss`` names; or the newest."""
    if text is not None and not _names_step(text):
        raise UsageError(
            f"STEP: expected a number, latest, best:METRIC or best:METRIC:max, found {text!r:.80}"
        )
    step = int(text) if text is not None and _DIGITS.fullmatch(text) else text
    return named_steps.candidates(run, step)[-1]


def _names_step(text: str) -> bool:
    return _DIGITS.fullmatch(text) is not None or is_name(text)


def require_no_step(text: str) -> None:
    """Raises UsageError if a new path to write to is what a person types to choose a step."""
    if _names_step(text) and not os.path.lexists(text):
        raise UsageError(
            f"{text}: expected a path to write to, found what names a step: give DIRECTORY/{text} "
            f"to choose the step, or ./{text} to write to a path of this name"
        )


@contextlib.contextmanager
def as_usage_error() -> Iterator[None]:
    """Turns the DirectoryError of a path that cannot be used into a UsageError."""
    try:
        yield
    except DirectoryError as error:
        raise UsageError(str(error)) from error


def path_of(text: str, *, as_mirror: bool = False) -> epath.Path:
    """Returns the path or URL that an argument names; UsageError if it names none."""
    with as_usage_error():
        return location.resolve(text, as_mirror=as_mirror)


def folder_path(text: str, *, as_mirror: bool = False) -> epath.Path:
    """Returns the path or URL of a folder, which need not exist; UsageError for a file."""
    path = path_of(text, as_mirror=as_mirror)
    if os.path.lexists(path) and not os.path.isdir(path):
        raise UsageError(f"{text}: is not a directory")
    return path


def output_path(text: str) -> Path:
    """Returns the local path of a file or folder to write; UsageError for one within a step."""
    require_no_step(text)
    path = local_path(text)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UsageError(f"{text}: is neither a file nor a directory")
    place = epath.Path(path)
    step = given_step.of(place.parent if place.is_file() else place, list, is_marked=False)
    if step is not None:
        raise UsageError(
            f"{text}: expected a path outside of the steps of a run, found {step}: give another "
            "name, because a deletion of the step would delete what is written there"
        )
    return path


def local_path(text: str) -> Path:
    """Returns the path on this host that an argument names, as it was given; else UsageError."""
    with as_usage_error():
        reason = "files for or of other programs are read and written locally only"
        return location.on_this_host("PATH", text, reason)


def run_at(directory: str, *, read_only: bool = True, reads_step: bool = True) -> RunDirectory:
    """Returns the run at a path, or, at the path of a step, its run with this step only."""
    path = folder_path(directory, as_mirror=True)
    run = RunDirectory(path, read_only=read_only, reads_step=reads_step)
    if not run.is_of_one_step and medium.of(path).is_missing(path):
        raise UsageError(f"{directory}: no such directory")
    return run


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
