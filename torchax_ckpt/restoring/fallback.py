"""The choice of the step to read: the newest readable one, with a warning for each one skipped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DirectoryError,
    StepNotFoundError,
    UnusableStateError,
)
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.runtime import user_warnings
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored.stored_step import still_there

T = TypeVar("T")


def newest_readable(
    candidates: Sequence[CommittedStep], attempt: Callable[[CommittedStep], T]
) -> tuple[T, tuple[int, ...]]:
    """Returns what ``attempt`` gives for the newest readable step, and the numbers skipped.

    Candidates come oldest first; of one number there may be one in each tier. A skipped step is
    logged and issued as a UserWarning; no warning filter keeps an older step from being read.

    Raises:
      CorruptCheckpointError: none of them can be read; the error of the newest.
      UnusableStateError: nor can they, and what they were to be restored into is gone already.
      StepNotFoundError: all were deleted meanwhile.
    """
    first_error: CheckpointError | None = None
    skipped: list[int] = []
    for left, committed in reversed(list(enumerate(candidates))):
        try:
            return attempt(committed), tuple(skipped)
        except StepNotFoundError as error:  # whoever writes here has deleted it meanwhile
            first_error = first_error or error
        except (CorruptCheckpointError, UnusableStateError) as error:
            if not is_damage(error):
                raise
            first_error = error if isinstance(error, UnusableStateError) else first_error or error
            if left == 0:
                break
            skipped.append(committed.step)
            user_warnings.warn(f"skipping an unreadable checkpoint: {error}", stacklevel=4)
    assert first_error is not None, "called with no candidates"
    raise first_error


@contextlib.contextmanager
def reading(
    committed: CommittedStep, directory: RunDirectory, processes: Processes
) -> Iterator[None]:
    """A round in which a step is read; notes it if the step is damaged, and offers others.

    Where each process has a place of its own, a failure says nothing of the copy there.

    Raises:
      StepNotFoundError: it was deleted while it was read.
    """
    looked = contextlib.nullcontext() if processes.is_per_host else still_there(committed)
    try:
        with looked, processes.round(f"reading step {committed.step}"):
            yield
    except CheckpointError as error:
        is_readable = not is_damage(error) and not isinstance(error, DirectoryError)
        if processes.is_per_host or is_readable:
            raise
        if is_damage(error):
            directory.verified.note(committed, is_sound=False)
        with contextlib.suppress(Exception):  # the storage may not answer: this error counts
            others = [s for s in directory.steps() if s.step != committed.step]
            text = f". Other steps there: {directory.verified.named(others)}."
            error.message = error.message.rstrip(".") + text
        raise


def is_damage(error: BaseException) -> bool:
    """Whether a restore or load has failed because the step is damaged."""
    if isinstance(error, UnusableStateError):
        return isinstance(error.__cause__, CorruptCheckpointError)
    return isinstance(error, CorruptCheckpointError)
