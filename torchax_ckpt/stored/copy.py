"""Copies steps from one directory to another, and reads back each copy before its commit."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import logging
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from etils import epath

from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DirectoryError,
    StepNotFoundError,
)
from torchax_ckpt.runtime import background
from torchax_ckpt.storage.directory import commit_record, shared_files, step_folder
from torchax_ckpt.storage.directory.committed_step import VERIFIED, CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.directory.shared_files import File
from torchax_ckpt.storage.medium import medium, storage_errors
from torchax_ckpt.stored.stored_step import StoredStep, still_there

logger = logging.getLogger(__name__)

# What a step gets at its commit, from ``StepFolder``, or when it is verified.
LEFT_OUT = {VERIFIED, commit_record.MARK, step_folder.INDICATOR}
_CHUNK_BYTES = 1 << 20
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
    share is copied once and shared again; in a bucket, the service copies it again. Raises
    DirectoryError, LeaseError, and ForeignCheckpointError for a step without digests.
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
        first_copies: dict[tuple[str, File], epath.Path] = {}
        for committed in sound:
            with leaving_out_lost():
                copied.append(_copy(committed, target, first_copies, on_bytes))
    return copied


def _copy(
    committed: CommittedStep,
    target: RunDirectory,
    first_copies: dict[tuple[str, File], epath.Path],
    on_bytes: Callable[[int], None],
) -> CommittedStep:
    """Copies a step; adds the copy to ``first_copies`` for each file that later steps may have."""
    with (
        storage_errors.translated(f"copy step {committed.step} to", target.path),
        still_there(committed),
        step_folder.writing(target, committed.step) as folder,
    ):
        shared = shared_files.linked_files(committed.path)
        known = {n: first_copies[n, f] for n, f in shared.items() if (n, f) in first_copies}
        copy_files(committed.path, folder.path, known, on_bytes)
        require_intact(committed, folder.path)
        mark = (committed.path / commit_record.MARK).read_bytes()
        on_bytes(len(mark))
        done = folder.commit(mark)
    for name_and_file in shared.items():
        first_copies.setdefault(name_and_file, done.path)
    target.verified.note(done, is_sound=True)
    target.verified.mark([done])
    return done


def require_intact(committed: CommittedStep, copied: epath.Path) -> None:
    """Raises CorruptCheckpointError if the copy of a step, not committed yet, is damaged."""
    try:
        StoredStep(dataclasses.replace(committed, path=copied)).verify()
    except (CorruptCheckpointError, StepNotFoundError) as error:
        # In a bucket, what is not committed is no step, and so counts as deleted.
        damage = error if isinstance(error, CorruptCheckpointError) else error.__cause__
        if not isinstance(damage, CorruptCheckpointError):
            raise
        raise CorruptCheckpointError(
            f"the copy of step {committed.step} in {committed.path} differs from what was saved, "
            "and does not count. The original may be damaged: check it with torchax-ckpt verify. "
            f"{damage}",
            step=committed.step,
            path=committed.path,
            file=damage.file,
            key_path=damage.key_path,
        ) from damage


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
    *,
    but: Collection[str] = (),
    there: Mapping[str, int] = types.MappingProxyType({}),
) -> None:
    """Copies the files of a step; those of a name in ``known`` have a copy in the step there.

    Leaves out the commit mark, ``verified``, what the folder of a new step has already, and the
    files ``but``. ``there`` has the sizes of what an interrupted copy has left, to go on from.
    """
    names = {file.name for file in medium.of(source).files(source)}
    if not names:  # another program has removed it
        raise FileNotFoundError(errno.ENOENT, "there are no files", str(source))
    has_failed = background.Flag()

    def on_piece(num_bytes: int) -> None:
        if has_failed.is_set:  # the other files need not be copied to their end
            raise concurrent.futures.CancelledError
        on_bytes(num_bytes)

    with concurrent.futures.ThreadPoolExecutor(_PARALLEL) as pool:
        copies = [
            pool.submit(
                _copy_file, source, target, file, known.get(file), on_piece, there.get(file, 0)
            )
            for file in sorted(names - LEFT_OUT - {*but})
        ]
        try:
            for copy in concurrent.futures.as_completed(copies):  # the first failure ends all
                copy.result()
        except BaseException:
            has_failed.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _copy_file(
    source: epath.Path,
    target: epath.Path,
    name: str,
    first_copy: epath.Path | None,
    on_bytes: Callable[[int], None],
    first: int = 0,
) -> None:
    storage = medium.of(target)
    storage.make_inner_folder((target / name).parent)
    if first_copy is not None:
        try:
            storage.take_over(first_copy, target, [name])
            return
        except OSError as error:  # a service may refuse copies
            logger.debug("%s: is copied once more: %s", target / name, error)
    first = storage.continues_at(first)
    mode = "ab" if first else "wb"
    with (source / name).open("rb") as reading, (target / name).open(mode) as writing:
        reading.seek(first)
        while content := reading.read(_CHUNK_BYTES):
            writing.write(content)
            on_bytes(len(content))
