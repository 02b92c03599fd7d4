"""Decides whether a directory that was given as a run is a step, and says what to do then."""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Callable, Sequence

from etils import epath

from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.storage.directory import commit_record
from torchax_ckpt.storage.directory.committed_step import LOST, CommittedStep
from torchax_ckpt.storage.medium import location, medium

logger = logging.getLogger(__name__)

NUMBER = re.compile("0|[1-9][0-9]*")
# The first finds a number in any folder's name, such as best-20. The second matches only names that
# state the number of their step.
_LAST_NUMBER = re.compile(r"(?:.*?[^0-9])??([0-9]{1,19})(?:-[0-9]+)?", re.DOTALL)
_TELLING = re.compile(r"(?:(?:incoming|abandoned)-)?([0-9]{1,19})(?:-[0-9]+)?")
# Shell patterns of what a run has in its directory; the first is that of its steps.
_OF_A_RUN = ("[0-9]*", "incoming-[0-9]*", "abandoned-[0-9]*", "events", "run", "unchanged")


def of(
    path: epath.Path,
    steps: Callable[[], list[CommittedStep]],
    *,
    is_marked: bool,
    reads_step: bool = False,
) -> epath.Path | None:
    """Returns the step that a directory is or lies in, or that it would be; None for a run.

    ``steps`` lists the steps in the directory. If there are some, it is a run that was started in a
    step; a warning then says how to get it out. With ``reads_step``, the directory nevertheless
    stands for the step. ``is_marked`` says whether a bucket has a commit mark there. Raises
    DirectoryError for a file.
    """
    is_there, own = path.exists(), path if is_marked else None
    if is_there and not path.is_dir():
        text = "expected a directory, found a file. Give each run a directory of its own."
        raise DirectoryError(f"{path}: {text}", path=path)
    # Also a folder in a step, such as its state.
    step = next(filter(commit_record.is_step, medium.of(path).around(path)), own)
    if step is not None and (inside := steps()):
        names_step = reads_step and step == location.real(path)
        _warn_of_steps_inside(path, step, inside, names_step=names_step)
        return step if names_step else None
    return path if step is None and _would_be_a_step(path, is_there=is_there) else step


def tells_number(step: epath.Path) -> bool:
    """Returns whether the name of a step's folder tells its number; the step does not store it."""
    return _TELLING.fullmatch(step.name) is not None


def step_in(folder: epath.Path) -> CommittedStep:
    """Returns the step in a folder of any name; its number is one in the name, or else 0."""
    number = _LAST_NUMBER.fullmatch(folder.name)
    time = commit_record.time_or_none(folder) or LOST
    return CommittedStep(int(number[1]) if number else 0, folder, time)


def refused(step: epath.Path) -> DirectoryError:
    """Returns the error for a step that was given where a run is needed."""
    what = f"a step. Copy it to a run of its own: torchax-ckpt copy {step} DIRECTORY"
    if not tells_number(step):
        what = "a step, whose folder has another name: rename it to its number of steps, and copy "
        what += "it to a run of its own: torchax-ckpt copy NUMBER DIRECTORY"
    if NUMBER.fullmatch(step.name):
        what = f"its step {step.name}; the run is {step.parent}: give this directory"
        if not step.exists():
            what = f"no such step; the run is {step.parent}: give this directory, or a name "
            what += "that is no number"
    return DirectoryError(f"{step}: expected the directory of a run, found {what}", path=step)


def _would_be_a_step(path: epath.Path, *, is_there: bool) -> bool:
    """Returns whether a path in a run has a step's name, and is empty or does not exist."""
    if not NUMBER.fullmatch(path.name):
        return False
    if not medium.of(path.parent).has_run(path.parent, _is_numbered_step):
        return False
    return not (is_there and any(path.iterdir()))  # last: a local tier may be unreadable


def _is_numbered_step(folder: epath.Path) -> bool:
    return NUMBER.fullmatch(folder.name) is not None and commit_record.is_step(folder)


def _warn_of_steps_inside(
    path: epath.Path, step: epath.Path, steps: Sequence[CommittedStep], *, names_step: bool
) -> None:
    """Says how to get a run out of a step, which would be deleted with it."""
    new = f"{step.parent}-{step.name}"
    there = [child.name for child in path.iterdir()]
    moved = [p for p in _OF_A_RUN if p == _OF_A_RUN[0] or fnmatch.filter(there, p)]
    logger.warning(
        "%s: %s the steps %s of another run inside, which a deletion of the step would delete. End "
        "the programs that write there, then give that run a directory of its own: %s",
        path,
        "reading this step, and none of"
        if names_step
        else f"expected the directory of a run, found a step, {step}, with",
        ", ".join(map(str, sorted({s.step for s in steps})[-5:])),
        medium.of(path).command_to_move(moved, new),
    )
