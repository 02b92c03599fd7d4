"""The directory of a run: which steps are there, and how they come, move and go.

    DIRECTORY/120/             a committed step
    DIRECTORY/incoming-120/    a committed step whose number an abandoned one still occupies, or on
                               a bucket one that did not come to be; there also incoming-120-2, ...
    DIRECTORY/abandoned-120/   a step of an abandoned branch, set aside; never read again
    DIRECTORY/deleting-120/    a step that is being removed
    DIRECTORY/writing-120-...  a save in flight, or one that was killed
    DIRECTORY/120/verified     whose bytes were read back whole and are what was saved
    DIRECTORY/lease            who is writing, see ``lease.py``; not there when nobody is
    DIRECTORY/events/          what happened, for people; nothing that is restored depends on it
    DIRECTORY/run              which run this is, where it has a local tier; see ``run_identity.py``

Which steps are abandoned, and so do not count, is in ``abandonment.py``. A run may have two
directories, a durable one and a local one in front of it, and a step of either may abandon steps
of both. What cannot be read for now is an error here, never an absent step: a run must not go
back, or start anew, for a passing failure.

On a bucket, where nothing can be renamed, a step is written under its own name, and Orbax's commit
mark, which comes last, makes it one. Moved object by object it would be none meanwhile, so an
incoming step stays where it is. A request may be carried out there long after its answer was given
up for lost, and a writer that was stalled and lost its lease goes on with the step it was in the
middle of. So nothing is deleted but the very object that was looked at, and a name under which a
save has begun, of this program or of one before it, is not used again. What remains is a step of
which a stalled writer had written nothing yet, and its successor everything. Locally every
writer's saves have names of their own until they are committed.

Listing and reading change nothing. One process at a time may write: whoever holds the lease. Of the
processes of one run that is the first, which claims, cleans up, commits and deletes for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from torchax_ckpt.errors import DirectoryError, StepNotFoundError
from torchax_ckpt.policies import CheckpointInfo
from torchax_ckpt.storage.directory import commit_record, lease, run_identity
from torchax_ckpt.storage.directory.abandonment import Abandonment, Branches
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.compare_and_swap import DRAFT_SUFFIX
from torchax_ckpt.storage.directory.summaries import Summaries
from torchax_ckpt.storage.directory.verified import Verified
from torchax_ckpt.storage.medium import bucket, fsync, location, permissions, storage_errors

logger = logging.getLogger(__name__)

_LEFTOVER = re.compile(
    r"deleting-\d+.*|writing-\d+-.*|(incoming-)?\d+\.orbax-checkpoint-tmp.*"
    rf"|({lease.NAME}|{run_identity.NAME}|{permissions.PROBE})-.*{re.escape(DRAFT_SUFFIX)}"
)
# What is no step, nor one set aside, as long as it has no commit mark.
_MARKED = re.compile(r"(incoming-|abandoned-)?\d+(-\d+)?")


class RunDirectory:
    """The directory of one run.

    Attributes:
      verified: the steps that were read back whole.
      abandonment: which steps do not count.

    Args:
      directory: a local path or ``gs://bucket/prefix``.
      read_only: refuse to write; a bucket that this account may not write to is good enough.
      durable: the durable directory of the run, if this is the local one in front of it.

    Raises:
      DirectoryError: it is a file, or not a path; a bucket that is not there or may not be used.
    """

    def __init__(
        self, directory: Any, *, read_only: bool = False, durable: RunDirectory | None = None
    ) -> None:
        self.path = location.resolve(directory)
        self._is_bucket = location.is_bucket(self.path)
        if self._is_bucket:
            bucket.use(self.path, self)
            bucket.check(self.path, for_writing=not read_only)
        with self._translated("read"):
            if self.path.exists() and not self.path.is_dir():
                text = "expected a directory, found a file. Give a path of its own to every run."
                raise DirectoryError(f"{self.path}: {text}", path=self.path)
        self._summaries = Summaries()
        self._commit_times = commit_record.CommitTimes()
        self.verified = Verified()
        self.abandonment: Abandonment = Abandonment(
            self.path, self.found, self._summaries, None if durable is None else durable.abandonment
        )
        self._is_read_only = read_only
        self._num_writes = 0
        self._runs: Sequence[str] = ()  # as this program has named it
        self._used_names: set[str] = set()
        self._lease = lease.Lease(self.path)
        self._durable = durable

    # --- reading ---

    def steps(self) -> list[CommittedStep]:
        """The committed steps that count, oldest first; reads the directory anew."""
        return list(self.branches().committed)

    def branches(self) -> Branches:
        """The committed steps, those that count and the others; reads the directory anew."""
        return self.abandonment.branches()

    def found(self, first: int = 0) -> list[CommittedStep]:
        """The committed steps from this number on, also those that do not count."""
        with self._translated("read"):
            is_ours = self._durable is None or run_identity.is_before(self.path, self._durable.path)
            return self._visible(first) if is_ours else []

    def find(self, step: int) -> CommittedStep:
        """The step of this number.

        Raises:
          StepNotFoundError: there is none; names those there are.
        """
        steps = {committed.step: committed for committed in self.steps()}
        if step in steps:
            return steps[step]
        there = ", ".join(map(str, steps)) or "none"
        text = f"{self.path}: no checkpoint at step {step}; there are: {there}"
        raise StepNotFoundError(text, step=step, path=self.path)

    def metrics(self, committed: CommittedStep) -> dict[str, Any]:
        """The metrics saved with a step; {} if there are none."""
        with self._translated("read"):
            return self._summaries.metrics(committed)

    def info(self, committed: CommittedStep) -> CheckpointInfo:
        """The step as policies see it."""
        return CheckpointInfo(
            committed.step,
            committed.path,
            metadata=None,
            commit_timestamp_nsecs=committed.commit_timestamp_nsecs,
            metrics=self.metrics(committed),
        )

    def _visible(self, first: int = 0) -> list[CommittedStep]:
        return self._commit_times.steps_among(self._children(), first)

    def _children(self) -> list[epath.Path]:
        try:
            return list(self.path.iterdir())
        except (FileNotFoundError, NotADirectoryError):  # a bucket knows only what is in them
            return []

    # --- writing ---

    def claim(self) -> None:
        """Creates the directory, takes the lease, and proves that it can be written.

        Raises:
          DirectoryError: it cannot be created or written, or is only to be read.
          LeaseError: another program writes to it.
        """
        self._require_writable()
        with self._translated("create and write"):
            permissions.make_folder(self.path)
            self.fence()
            permissions.prove_writable(self.path, DRAFT_SUFFIX)

    def runs(self) -> list[str]:
        """The name that the run of a durable directory has, if it has one; for the one writer."""
        with self._translated("read"):
            self.fence()
            return run_identity.names(self.path)

    def join(self, present: Sequence[str], name: str) -> None:
        """Makes it a directory of a run; what a local tier has of another is removed first.

        Args:
          present: the name that the run has now, if it has one.
          name: which it is about to be given.
        """
        with self._translated("write"):
            self.fence()
            is_local = self._durable is not None
            if is_local and not set(present) & set(run_identity.names(self.path, is_local=True)):
                left = self._visible()
                run_identity.require_local(self.path, [s.step for s in left])
                for committed in left:
                    logger.warning("%s: removing step %d of another run", self.path, committed.step)
                    self.delete(committed)
            self._runs = [*present, name]
            run_identity.write(self.path, self._runs, is_local=is_local)

    def leave_tiers(self) -> None:
        """A program without a local tier goes on: those that there were miss its steps."""
        with self._translated("write"):
            self.fence()
            run_identity.forget(self.path)

    def fence(self) -> None:
        """Makes sure, right before something becomes visible, that this program may write.

        Raises:
          LeaseError: another program writes to the directory.
        """
        self._lease.hold()

    def release(self) -> None:
        """Ends writing: others may."""
        self._lease.release()

    def recover(self) -> None:
        """Finishes or removes what a killed process left behind. For the one writer only."""
        with self._translated("clean up"):
            self.fence()
            visible = self._visible()
            self.set_aside(self.abandonment.certain_among(visible))
            for committed in visible:
                if committed.is_incoming:
                    self.settle(committed)
            for child in self._children():
                if _LEFTOVER.fullmatch(child.name) or (
                    _MARKED.fullmatch(child.name) and commit_record.is_begun(child)
                ):
                    logger.info("removing %s, left behind by a killed save or delete", child)
                    commit_record.remove_leftover(child)

    def path_for(self, step: int) -> epath.Path:
        """Where to write a step until it is committed."""
        if self._runs and not (self.path / run_identity.NAME).exists():  # it was removed meanwhile
            self.fence()
            run_identity.write(self.path, self._runs, is_local=self._durable is not None)
        if not self._is_bucket:
            # Every save under a name of its own: what a failed one still has in flight, or a writer
            # that was stalled and lost its lease, must not write into the step of a later one.
            self._num_writes += 1
            return self.path / f"writing-{step}-{self._lease.token}-{self._num_writes}"
        more = (f"incoming-{step}-{count}" for count in itertools.count(2))
        for name in itertools.chain((str(step), f"incoming-{step}"), more):
            path = self.path / name
            # A request of a failed save may still be carried out, and overwrite what a later save
            # writes under the same name.
            if name not in self._used_names and not path.exists():
                self._used_names.add(name)
                return path
        raise AssertionError("the numbers have ended")

    def commit(self, step: int, written: epath.Path, at: int | None = None) -> CommittedStep:
        """Makes a written step visible, under its number or beside an abandoned step that has it.

        Args:
          step, written: the step, and where it lies.
          at: when it counts as committed, where several hosts have agreed on that.

        Raises:
          LeaseError: another program writes to the directory by now.
        """
        path = written
        if at is not None:
            commit_record.set_time(written, at)
        if not self._is_bucket:
            path = self.path / str(step)
            if path.exists():
                path = self.path / f"incoming-{step}"
            self.fence()
            written.rename(path)
            fsync.sync(self.path)
        commit_time = self._commit_times.read(path)
        if not commit_time:
            raise DirectoryError(
                f"{path}: was written, but is not committed: something else removes or changes "
                "files here",
                path=path,
                step=step,
            )
        return CommittedStep(step, path, commit_time, is_incoming=path.name != str(step))

    def settle(self, incoming: CommittedStep) -> CommittedStep:
        """Moves an incoming step to its own name; what was there is set aside."""
        if self._is_bucket:
            return incoming
        final = self.path / str(incoming.step)
        if final.exists():
            self._move_aside(final, incoming.step)
        self.fence()
        incoming.path.rename(final)
        return dataclasses.replace(incoming, path=final, is_incoming=False)

    def know_summary(self, committed: CommittedStep, summary: Mapping[str, Any]) -> None:
        """Takes the summary that was just written, which then need not be read."""
        self._summaries.know(committed, summary)

    def set_aside(self, abandoned: Iterable[CommittedStep]) -> None:
        """Renames steps of an abandoned branch, so that nothing resumes from them.

        Those in a local tier are deleted: their room is needed.
        """
        for committed in abandoned:
            if committed.path.exists():
                self._move_aside(committed.path, committed.step)

    def _move_aside(self, path: epath.Path, step: int) -> None:
        if self._durable is not None:
            logger.warning("%s: removing step %d of an abandoned branch", self.path, step)
            self._remove(path, step)
            return
        target = self.path / f"abandoned-{step}"
        count = 1
        while target.exists():
            count += 1
            target = self.path / f"abandoned-{step}-{count}"
        self.fence()
        logger.warning("setting aside step %d of an abandoned branch as %s", step, target)
        if not self._is_bucket:
            path.rename(target)
            return
        # Object by object: a process killed meanwhile leaves two halves without a mark, which are
        # removed, and never one that looks like a step.
        mark = (path / commit_record.MARK).read_text()
        bucket.remove(path / commit_record.MARK)
        path.rename(target)
        (target / commit_record.MARK).write_text(mark)

    def delete(self, committed: CommittedStep) -> None:
        """Removes a step: first its name or commit mark, then its files.

        A process killed in between leaves nothing that looks like a checkpoint.
        """
        self._require_writable()
        with self._translated("delete from"):
            self.fence()
            if self._is_bucket:
                bucket.remove(committed.path / commit_record.MARK)
                bucket.remove(committed.path)
            elif committed.path.exists():  # else somebody else has removed it
                self._remove(committed.path, committed.step)
        self._summaries.forget(committed)
        self.verified.forget(committed)

    def _remove(self, path: epath.Path, step: int) -> None:
        self.fence()
        doomed = self.path / f"deleting-{step}"
        if doomed.exists():
            doomed.rmtree()
        path.rename(doomed)
        doomed.rmtree()

    def prune(self, keep: Sequence[bool], steps: Sequence[CommittedStep]) -> list[int]:
        """Deletes the steps that are not kept, but never the newest verified durable one.

        Returns:
          The numbers of the deleted steps.
        """
        doomed = [s for s, kept in zip(steps, keep, strict=True) if not kept]
        if self._durable is None:  # a local tier has room for no more
            spared = self.verified.newest_of(doomed, steps)
            doomed = [s for s in doomed if s is not spared]
        for committed in doomed:
            self.delete(committed)
        return [s.step for s in doomed]

    def _require_writable(self) -> None:
        if self._is_read_only:
            raise DirectoryError(
                f"{self.path}: is only to be read here: CheckpointOptions(read_only=True)",
                path=self.path,
            )

    def _translated(self, action: str) -> contextlib.AbstractContextManager[None]:
        return storage_errors.translated(action, self.path)
