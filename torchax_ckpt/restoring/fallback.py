"""Chooses the newest step that can be read. Warns about each newer step that it skips."""

from __future__ import annotations

import contextlib
import socket
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
from torchax_ckpt.runtime import user_messages
from torchax_ckpt.storage.directory import shared_files
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored.stored_step import still_there

T = TypeVar("T")


def newest_readable(
    find: Callable[[], Sequence[CommittedStep]],
    attempt: Callable[[CommittedStep], T],
    is_spare: Callable[[CommittedStep], bool] = lambda committed: False,
) -> tuple[T, tuple[int, ...]]:
    """Returns ``attempt``'s result for the newest readable step, and the numbers of skipped steps.

    Tries the steps that ``find`` returns, the last one first. Skips damaged steps, and those of a
    local tier (``is_spare``) that cannot be read now. Each skipped step is a UserWarning; older
    ones are tried even if a filter makes it an error. If none can be read, raises the first one's
    error, but UnusableStateError if state is lost. If the program that writes there has deleted
    them meanwhile, finds its steps again.
    """
    candidates, gone = find(), set[Key]()
    while True:
        try:
            return _newest_of(candidates, attempt, is_spare)
        except StepNotFoundError:
            gone |= {committed.key for committed in candidates}
            with contextlib.suppress(StepNotFoundError):
                candidates = find()
            if candidates[-1].key in gone:
                raise


def _newest_of(
    candidates: Sequence[CommittedStep],
    attempt: Callable[[CommittedStep], T],
    is_spare: Callable[[CommittedStep], bool],
) -> tuple[T, tuple[int, ...]]:
    first_error: CheckpointError | None = None
    skipped: list[int] = []
    for left, committed in reversed(list(enumerate(candidates))):
        try:
            return attempt(committed), tuple(skipped)
        except StepNotFoundError as error:  # the writing program deleted the step
            first_error = first_error or error
        except (CorruptCheckpointError, DirectoryError, UnusableStateError) as error:
            is_unreadable_spare = isinstance(error, DirectoryError) and is_spare(committed)
            if not is_damage(error) and not is_unreadable_spare:
                raise
            first_error = error if isinstance(error, UnusableStateError) else first_error or error
            if left == 0:
                break
            skipped.append(committed.step)
            text = "skipping an unreadable checkpoint"
            if is_unreadable_spare:
                text = f"host {socket.gethostname()} skips a step of its local tier"
            user_messages.warn(f"{text}: {error}")
    assert first_error is not None, "called with no candidates"
    raise first_error


@contextlib.contextmanager
def reading(
    committed: CommittedStep, directory: RunDirectory, processes: Processes
) -> Iterator[None]:
    """Runs the ``with`` block, which reads a step, within a round of the processes.

    Records damage, also for the steps that share the damaged file, and names these in the error;
    not if each host has its own directory, where another host's failure says nothing about ours.
    """
    existing = contextlib.nullcontext() if processes.is_per_host else still_there(committed)
    try:
        with existing, processes.round(f"reading step {committed.step}"):
            yield
    except CheckpointError as error:
        is_damaged = is_damage(error)
        if processes.is_per_host or not (is_damaged or isinstance(error, DirectoryError)):
            raise
        if is_damaged:
            directory.verified.note(committed, is_sound=False)
        # If storage cannot list the other steps, the error of the read still has to be raised.
        with contextlib.suppress(Exception):
            others = [s for s in directory.branches().committed if s.step != committed.step]
            if is_damaged:
                sharing = shared_files.damaged_too(error, committed, others)
                for other in sharing:
                    directory.verified.note(other, is_sound=False)
                error.message = shared_files.naming(error.message, sharing)
            text = f". Other steps in the directory: {directory.verified.named(others)}."
            error.message = error.message.rstrip(".") + text
        raise


def is_damage(error: BaseException) -> bool:
    """Returns whether an error of a restore or load shows that the step is damaged."""
    if isinstance(error, UnusableStateError):
        return isinstance(error.__cause__, CorruptCheckpointError)
    return isinstance(error, CorruptCheckpointError)
