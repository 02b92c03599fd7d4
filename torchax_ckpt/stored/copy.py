"""Copies steps from one directory to another, and reads back each copy before its commit."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from etils import epath

from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DirectoryError,
    StepNotFoundError,
)
from torchax_ckpt.storage.directory import commit_record, shared_files, step_folder
from torchax_ckpt.storage.directory.committed_step import VERIFIED, CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.directory.shared_files import File
from torchax_ckpt.storage.medium import local_medium, medium, storage_errors
from torchax_ckpt.stored.stored_step import StoredStep, still_there

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 16 << 20
# The number of files copied at a time: each is at least one round trip to a bucket.
_PARALLEL = 8


def copy_steps(
    steps: Sequence[CommittedStep],
    target: RunDirectory,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
    on_left_out: Callable[[CheckpointError], None] = lambda error: None,
) -> list[CommittedStep]:
    """Copies steps under the lease of ``target``, oldest first; marks the copies as verified.

    A copy becomes visible only after every byte of it was compared with the digests of the save. A
    step that is damaged or deleted meanwhile goes to ``on_left_out``. A file that several steps
    share is copied once and shared again, except on a bucket. Raises DirectoryError, LeaseError,
    and ForeignCheckpointError for a step without digests.
    """
    copied: list[CommittedStep] = []

    @contextlib.contextmanager
    def leaving_out_lost() -> Iterator[None]:
        try:
            yield
        except (StepNotFoundError, CorruptCheckpointError) as error:
            on_left_out(error)

    sound = []
    for committed in steps:
        with leaving_out_lost():
            # Raises for links or a missing manifest before anything is created.
            StoredStep(committed)
            sound.append(committed)
    if not sound:
        return []
    _require_absent(sound, target)
    with step_folder.claimed(target):
        _require_absent(sound, target)  # again: only from now on no other program writes
        first_copies: dict[File, epath.Path] = {}
        for committed in sound:
            with leaving_out_lost():
                copied.append(_copy(committed, target, first_copies, on_bytes))
    return copied


def _copy(
    committed: CommittedStep,
    target: RunDirectory,
    first_copies: dict[File, epath.Path],
    on_bytes: Callable[[int], None],
) -> CommittedStep:
    """Copies a step; ``first_copies``, of files that several steps have, gets those of this one."""
    with (
        storage_errors.translated(f"copy step {committed.step} to", target.path),
        still_there(committed),
        step_folder.writing(target, committed.step) as folder,
    ):
        has_links = medium.of(target.path).has_links
        shared = shared_files.linked_files(committed.path) if has_links else {}
        known = {name: first_copies[f] for name, f in shared.items() if f in first_copies}
        copy_files(committed.path, folder.path, known, on_bytes)
        try:
            StoredStep(dataclasses.replace(committed, path=folder.path)).verify()
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(
                f"the copy of step {committed.step} in {committed.path} differs from what was "
                "saved, and does not count. The original may be damaged: check it with "
                f"torchax-ckpt verify. {error}",
                step=committed.step,
                path=committed.path,
                file=error.file,
                key_path=error.key_path,
            ) from error
        mark = (committed.path / commit_record.MARK).read_bytes()
        on_bytes(len(mark))
        done = folder.commit(mark)
    for name, file in shared.items():
        first_copies.setdefault(file, done.path / name)
    target.verified.note(done, is_sound=True)
    target.verified.mark([done])
    return done


def _require_absent(steps: Sequence[CommittedStep], target: RunDirectory) -> None:
    present = {committed.step for committed in target.steps()}
    if both := sorted(present & {committed.step for committed in steps}):
        raise DirectoryError(
            f"{target.path}: has step {both[0]} already; nothing was copied. Copy to a directory "
            "without this step.",
            path=target.path,
        )


def copy_files(
    source: epath.Path,
    target: epath.Path,
    known: Mapping[str, epath.Path],
    on_bytes: Callable[[int], None],
) -> None:
    """Copies the files of a step, or links those of which ``known`` has a copy.

    Leaves out the commit mark, ``verified``, and what the folder of a new step has already.
    """
    names = {file.name for file in medium.of(source).files(source)}
    with concurrent.futures.ThreadPoolExecutor(_PARALLEL) as pool:
        copies = [
            pool.submit(_link_file, known[file], target / file)
            if file in known
            else pool.submit(_copy_file, source / file, target / file, on_bytes)
            for file in sorted(names - {VERIFIED, commit_record.MARK, step_folder.INDICATOR})
        ]
        try:
            for copy in copies:
                copy.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _link_file(source: epath.Path, target: epath.Path) -> None:
    medium.of(target).make_inner_folder(target.parent)
    local_medium.link_file(source, target)


def _copy_file(source: epath.Path, target: epath.Path, on_bytes: Callable[[int], None]) -> None:
    medium.of(target).make_inner_folder(target.parent)
    with source.open("rb") as reading, target.open("wb") as writing:
        while content := reading.read(_CHUNK_BYTES):
            writing.write(content)
            on_bytes(len(content))
