"""Copies a step to another directory of its run, its mirror or from there, as the newest step.

The copy has the commit time of the step, so both are one step. Its summary also lists the steps of
the other directory that it abandons, as a save lists them: whenever the copy is killed, they either
count and the new step does not, or the reverse.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from etils import epath

from torchax_ckpt import policies
from torchax_ckpt.errors import CorruptCheckpointError, DirectoryError, StepNotFoundError
from torchax_ckpt.layout import unchanged
from torchax_ckpt.options import Mirror
from torchax_ckpt.policies.preservation import preserved
from torchax_ckpt.runtime.stages import stage
from torchax_ckpt.saving import run_history
from torchax_ckpt.storage.directory import abandonment, commit_record, step_files, step_folder
from torchax_ckpt.storage.directory.committed_step import STATE, SUMMARY, CommittedStep
from torchax_ckpt.storage.directory.lineage import Branch
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.directory.shared_files import Usage
from torchax_ckpt.storage.directory.step_folder import StepFolder
from torchax_ckpt.storage.medium import medium, seals, storage_errors
from torchax_ckpt.stored import copy
from torchax_ckpt.stored.stored_step import StoredStep, still_there

logger = logging.getLogger(__name__)

# The files of a step that have arrived so far. Its number and commit time are in the folder's name.
_FETCHING = re.compile(r"fetching-[0-9]+-[0-9]+")


class Dropped(Exception):  # noqa: N818 - ends a copy from inside, and is no failure
    """``Copy.drop`` was called."""


class Copy:
    """A copy in flight: what was sent, how long the rest will take; ``drop`` ends it."""

    def __init__(
        self, committed: CommittedStep, on_bytes: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        self.committed = committed
        self._on_bytes = on_bytes
        self.sent_bytes = self.total_bytes = 0  # less the files that were there already
        self._began = time.monotonic()
        self.is_dropped = False
        self._lock = threading.Lock()  # several threads send

    @property
    def secs(self) -> float:
        """Seconds since the copy began."""
        return time.monotonic() - self._began

    @property
    def bytes_per_sec(self) -> float:
        """The rate so far."""
        return self.sent_bytes / max(self.secs, 1e-9)

    @property
    def secs_left(self) -> float:
        """Seconds until all is sent, at the rate so far; infinite before anything is sent."""
        left = max(0, self.total_bytes - self.sent_bytes)
        return left / self.bytes_per_sec if self.sent_bytes else float("inf")

    def drop(self) -> None:
        """Has the copy end as soon as it has sent another piece."""
        self.is_dropped = True

    def add(self, num_bytes: int) -> None:
        """Counts bytes that were sent; raises Dropped."""
        if self.is_dropped:
            raise Dropped
        with self._lock:
            self.sent_bytes += num_bytes
        self._on_bytes(num_bytes)


def num_bytes(committed: CommittedStep) -> int:
    """Returns the bytes of the files of a step that are copied."""
    return sum(_sizes(committed.path).values())


@stage("copy to the mirror")
def put(copying: Copy, mirror: RunDirectory, abandoned: Sequence[CommittedStep]) -> Branch:
    """Copies a step of a run to its mirror, under the mirror's lease; returns its branch then.

    Its summary lists the ``abandoned`` steps of the mirror. Files that a step of the mirror has
    already are not sent, where the service can copy them. The commit mark comes last, after a look
    at the sizes of all others.
    """
    committed, there = copying.committed, mirror.branches()
    unwanted = [*there.abandoned, *abandoned]
    with (
        storage_errors.translated(f"copy step {committed.step} to", mirror.path),
        still_there(committed),
        step_folder.writing(mirror, committed.step) as folder,
    ):
        sizes = _sizes(committed.path)
        shared = _take_over(sizes, there.committed, folder.path)
        copying.total_bytes = sum(sizes[name] for name in sizes.keys() - shared)
        copy.copy_files(committed.path, folder.path, {}, copying.add, but=shared)
        if _sizes(folder.path).items() != sizes.items():
            raise DirectoryError(
                f"{folder.path}: expected the files of step {committed.step}, found others, or "
                "some of other sizes, although all were sent. The next copy tries again",
                path=folder.path,
            )
        done = _commit(folder, copying, unwanted)
    return _branch_to(done, mirror)


@stage("fetch from the mirror")
def fetch(copying: Copy, target: RunDirectory, abandoned: Sequence[CommittedStep]) -> None:
    """Fetches a step from the mirror into a run's directory, under its lease.

    Its summary lists the ``abandoned`` steps of the run, which are then set aside. If the run has
    the step itself, damaged, that one is deleted when nothing but the commit is left to do. Goes on
    with what an interrupted fetch has left. Raises CorruptCheckpointError if what arrives differs
    from what was saved.
    """
    committed, there = copying.committed, target.branches()
    replaced = [step for step in there.in_place if step.key == committed.key]
    unwanted = [step for step in (*there.abandoned, *abandoned) if step not in replaced]
    StoredStep(committed)  # raises for links or a missing manifest before anything is created
    staged = target.path / f"fetching-{committed.step}-{committed.commit_timestamp_nsecs}"
    for name in filter(_FETCHING.fullmatch, medium.of(target.path).names_in(target.path)):
        if name != staged.name:
            medium.of(staged).remove_left(target.path / name, is_named_as_step=False)
    with (
        storage_errors.translated(f"fetch step {committed.step} to", target.path),
        still_there(committed),
    ):
        sizes = _sizes(committed.path)
        before = {name: n for name, n in _sizes(staged).items() if n <= sizes.get(name, 0)}
        copying.total_bytes = sum(sizes.values()) - sum(before.values())
        medium.of(staged).make_folder(staged)
        whole = [name for name, n in before.items() if n == sizes[name]]
        copy.copy_files(committed.path, staged, {}, copying.add, but=whole, there=before)
        try:
            with step_folder.writing(target, committed.step) as folder:
                medium.of(staged).take_over(staged, folder.path)
                copy.require_intact(committed, folder.path)
                done = _commit(folder, copying, unwanted, replaced)
        except CorruptCheckpointError:
            medium.of(staged).remove_left(staged, is_named_as_step=False)
            if not before:
                raise
        else:
            medium.of(staged).remove_left(staged, is_named_as_step=False)
            target.recover()
            target.verified.note(done, is_sound=True)
            if not replaced:  # a step that was replaced need not be the newest one
                _branch_to(done, target)
            return
    # What an earlier fetch had left may be damaged, and is gone now: fetches all files again.
    fetch(copying, target, abandoned)


def _sizes(folder: epath.Path) -> dict[str, int]:
    files = medium.of(folder).files(folder)
    return {file.name: file.num_bytes for file in files if file.name not in copy.LEFT_OUT}


def _take_over(
    sizes: Mapping[str, int], there: Sequence[CommittedStep], target: epath.Path
) -> set[str]:
    """Has the mirror put databases of frozen arrays that it has into a new step; names the files.

    A database is the same in two steps if its files have the same names, which are random, and
    sizes.
    """
    databases: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        parts = name.split("/")
        if parts[0] == STATE and parts[1].startswith(unchanged.FOLDER_PREFIX):
            databases.setdefault("/".join(parts[:2]), {})["/".join(parts[2:])] = size
    taken: set[str] = set()
    for folder, files in databases.items() if there else ():
        for step in reversed(there):
            if _sizes(step.path / folder) != files:
                continue
            try:
                medium.of(target).take_over(step.path / folder, target / folder)
            except OSError as error:  # a service may refuse copies
                logger.debug("%s: is sent once more: %s", target / folder, error)
                # Some files may be linked already, and to write them would change the other step.
                medium.of(target).remove_left(target / folder, is_named_as_step=False)
            else:
                taken.update(f"{folder}/{name}" for name in files)
            break
    return taken


def _commit(
    folder: StepFolder,
    copying: Copy,
    unwanted: Sequence[CommittedStep],
    replaced: Sequence[CommittedStep] = (),
) -> CommittedStep:
    """Commits the copy of a step, whose summary lists the unwanted steps beside it.

    Deletes the steps that it replaces before: two of one number and time would be one to a reader.
    """
    committed = copying.committed
    with step_files.as_corrupt(committed, SUMMARY):
        summary = seals.read_sealed(committed.path / SUMMARY)
    if unwanted:
        keys = sorted({step.key for step in unwanted} | abandonment.from_summary(summary))
        summary = {**summary, abandonment.SUMMARY_FIELD: [list(key) for key in keys]}
        path = folder.path / SUMMARY / "data.json"
        path.unlink()  # it may be a link to a file that stays
        path.write_bytes(seals.encoded(summary))
    mark = (committed.path / commit_record.MARK).read_bytes()
    with step_files.as_corrupt(committed, "commit record"):
        at_nsecs = commit_record.read_time(committed.path)
    # Another step may have got its name meanwhile, and some of its files may be among these.
    if at_nsecs != committed.commit_timestamp_nsecs:
        raise committed.error(StepNotFoundError, "was replaced by another one meanwhile")
    copying.add(0)  # once the copy was dropped, nothing may become visible
    for damaged in replaced:
        folder.directory.delete(damaged)
    done = folder.commit(mark)
    folder.directory.record_saved(done, summary)
    return done


def _branch_to(done: CommittedStep, directory: RunDirectory) -> Branch:
    """Returns a directory's branch, whose newest step must be the one that was copied there."""
    branch = directory.branch()
    if [step.key for step in branch.steps[-1:]] != [done.key]:
        raise DirectoryError(
            f"{done.path}: expected step {done.step} to be the newest one now that it was copied, "
            "found that it is not: another program changes this directory. End that program",
            step=done.step,
            path=done.path,
        )
    return branch


def prune(mirror: RunDirectory, settings: Mirror, coming_bytes: int = 0) -> None:
    """Deletes what the mirror need not keep; ``coming_bytes`` are those of a step that will come.

    The newest step of the run's branch that is not known to be damaged stays in any case. Abandoned
    steps stay, and do not count.
    """
    policy = settings.preservation_policy or policies.LatestN(2)
    steps = mirror.steps()
    damaged = [mirror.verified.is_damaged(step) for step in steps]
    keep = preserved(policy, run_history.checkpoint_infos(mirror, steps), damaged)
    kept = [step for step, is_kept in zip(steps, keep, strict=True) if is_kept]
    if settings.max_bytes is not None:
        flags = zip(steps, keep, damaged, strict=True)
        sound = [step for step, is_kept, is_damaged in flags if is_kept and not is_damaged]
        newest = (sound or kept)[-1:]
        while Usage(kept).total_bytes + coming_bytes > settings.max_bytes and kept != newest:
            kept.remove(next(step for step in kept if step not in newest))
    mirror.prune([step for step in steps if step not in kept])
