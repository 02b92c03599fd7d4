"""Lists, commits, renames and deletes the steps in the directory of a run.

    DIRECTORY/120/             a committed step
    DIRECTORY/incoming-120/    a committed step 120, saved while an abandoned step or, on a bucket,
                               an unfinished save had its name; also incoming-120-2, ...
    DIRECTORY/abandoned-120/   a step of an abandoned branch, set aside; never read again
    DIRECTORY/deleting-120/    a step that is being removed
    DIRECTORY/writing-120-...  a save in flight, or one that was killed
    DIRECTORY/120/verified     marks a step that a full read found intact
    DIRECTORY/lease            the program that writes now, if any; see ``lease.py``
    DIRECTORY/events/          the journal, for people; no restore depends on it
    DIRECTORY/unchanged/       frozen arrays for later steps; see ``writing/reused_files.py``
    DIRECTORY/run              the run's name, if it has a local tier; see ``run_identity.py``
    DIRECTORY/fetching-120-... what came of a step of a mirror so far; see ``mirroring/``

``abandonment.py`` decides which steps are abandoned. While storage cannot be read, a listing raises
an error, so that no run resumes from an older step.

How a folder becomes a step, and ceases to be one, depends on the storage, and is the work of its
medium (``medium/local_medium.py``). A step that a disk cannot rename stays as it is. If it is
abandoned, each later step goes on listing it as such.

Listing and reading change no files. Only the holder of the lease writes to the directory. In a run
of several processes, this is process 0, which commits and deletes steps for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from torchax_ckpt.errors import CheckpointError, DirectoryError
from torchax_ckpt.runtime import user_messages
from torchax_ckpt.runtime.stages import stage
from torchax_ckpt.storage.directory import (
    commit_record,
    committed_step,
    given_step,
    lease,
    leftovers,
    lineage,
)
from torchax_ckpt.storage.directory.abandonment import Abandonment, Branches, Key
from torchax_ckpt.storage.directory.committed_step import RANKS, CommittedStep, Verified
from torchax_ckpt.storage.directory.run_identity import RunName
from torchax_ckpt.storage.directory.step_files import Summaries
from torchax_ckpt.storage.medium import (
    location,
    medium,
    storage_errors,
)
from torchax_ckpt.storage.medium.stored_file import MARK, first_free

logger = logging.getLogger(__name__)


@functools.cache  # a run lists its tier at each save
def _warn_of_lost_tier(path: epath.Path, said: str) -> None:
    user_messages.warn(
        f"{path}: host {socket.gethostname()} cannot read its local tier, which counts as empty: "
        f"{said}. Steps of other hosts and of the durable directory count."
    )


class RunDirectory:
    """The directory of one run: a local path, or a prefix of a bucket.

    If ``directory`` is a step, this is the run of that step, but shows only that step. If a run was
    started inside the step, this is the inner run, unless ``reads_step``. For a local tier,
    ``durable`` is the run's durable directory. Raises DirectoryError if ``directory`` cannot be
    used; a bucket need not grant permission to write if ``read_only``.
    """

    def __init__(
        self,
        directory: Any,
        *,
        read_only: bool = False,
        reads_step: bool = False,
        durable: RunDirectory | None = None,
    ) -> None:
        self._durable = durable
        self.path = location.resolve(directory)
        given = medium.of(self.path)
        given.use(self)
        is_marked = given.require_usable(for_writing=not read_only, name=MARK)
        with self._translated("read"):
            self._step = given_step.of(
                self.path, self._visible, is_marked=is_marked, reads_step=reads_step
            )
        if self._step is not None:
            self.path = self._step.parent
        self._medium = medium.of(self.path)
        self._summaries = Summaries(is_local=durable is not None)
        self.verified = Verified()
        self.abandonment: Abandonment = Abandonment(
            self.path,
            self.all_committed,
            self._summaries,
            None if durable is None else durable.abandonment,
        )
        self._is_read_only = read_only
        self._left_out: dict[int, set[Key]] = {}
        # The keys of steps that were committed although their saves then failed.
        self.failed: set[Key] = set()
        # The keys of steps that could not be renamed -> why.
        self.staying: dict[Key, OSError] = {}
        self._has_warned = False
        self._lease = lease.Lease(self.path)
        self.run_name: RunName = RunName(
            self.path, self._summaries, self._visible, durable.run_name if durable else None
        )

    # --- reading ---

    def steps(self) -> list[CommittedStep]:
        """Lists the directory; returns the committed steps that are not abandoned, oldest first."""
        if self._step is None:
            return list(self.branches().committed)
        of_run: Sequence[CommittedStep] = ()
        if given_step.NUMBER.fullmatch(self._step.name):  # the run may have another of this number
            with contextlib.suppress(DirectoryError):  # this user may not list the run
                of_run = self.branches().committed
        given = [s for s in of_run if str(s.step) == self._step.name]
        if not given and self._step.exists():
            return [given_step.step_in(self._step)]
        return given

    def branches(self) -> Branches:
        """Lists the directory; returns the steps of the run's branch, and the abandoned steps."""
        return self.abandonment.branches()

    def all_committed(self, first: int = 0) -> list[CommittedStep]:
        """Lists the run's committed steps from number ``first`` on, including abandoned steps.

        A local tier that this host cannot read counts as empty, and a warning says so: other hosts,
        and the durable directory, have steps too.
        """
        durable = self._durable
        with self._translated("read"):
            run = None if durable is None else durable.run_name.names()
            try:
                ours = self.run_name.ours(self._visible(first), run)
            except OSError as error:
                if durable is None or isinstance(error, CheckpointError):
                    raise
                _warn_of_lost_tier(self.path, storage_errors.said(error))
                return []
        return [s for s in ours if s.key in self._left_out.get(s.step, (s.key,))]

    def abandoned(self) -> list[CommittedStep]:
        """Returns the steps that were set aside, and those that the newest step will set aside."""
        with self._translated("read"):
            aside = commit_record.aside_among(self._children())
        return sorted([*aside, *self.abandonment.listed_by_newest()], key=lambda s: s.key)

    def leave_out(self, step: int, known: Iterable[CommittedStep]) -> None:
        """Hides all but the ``known`` steps of this number: a failed save may have left one."""
        self._left_out[step] = {s.key for s in known if s.step == step}

    def candidates(self, step: int | None) -> list[CommittedStep]:
        """Returns all steps, oldest first, or the one of a number; else StepNotFoundError."""
        # A program that keeps one step may replace it while its directory is being listed.
        steps = self.steps() or self.steps() or self.steps()
        if self._step is not None and not steps:  # the error says what the run has
            steps, step = list(self.branches().committed), int(self._step.name)
        return committed_step.chosen(steps, step, [self.path])

    def metrics(self, committed: CommittedStep) -> dict[str, Any]:
        """Returns the metrics saved with a step; {} if there are none."""
        with self._translated("read"):
            return self._summaries.field(committed, "metrics")

    def ranks(self, committed: CommittedStep) -> dict[str, Any]:
        """Returns metric -> "min" or "max", as rules of the step's program ranked its metrics."""
        with self._translated("read"):
            return self._summaries.field(committed, RANKS)

    def branch(self) -> lineage.Branch:
        """Returns the steps of the run's branch, with what led to them, and what it has left."""
        return lineage.Branch(self.steps(), self.lineage, self.left, self.verified.is_damaged)

    def lineage(self, committed: CommittedStep) -> lineage.Lineage | None:
        """Returns the starts that led to a step; None if its summary or its record is damaged."""
        summary = None if committed.has_lost_record else self._summary(committed)
        return None if summary is None else lineage.of(summary)

    def has_lost_summary(self, committed: CommittedStep) -> bool:
        """Returns whether the summary of a step that is there is missing, damaged or another's."""
        return self._summary(committed) is None

    def _summary(self, committed: CommittedStep) -> Mapping[str, Any] | None:
        with self._translated("read"):
            return self._summaries.of(committed)

    def left(self) -> set[Key]:
        """Returns the keys of abandoned steps: set aside here, or listed by a step here."""
        with self._translated("read"):
            aside = commit_record.aside_among(self._children())
        return {step.key for step in aside} | self.abandonment.keys()

    def _visible(self, first: int = 0) -> list[CommittedStep]:
        return commit_record.steps_among(
            self._children(), first, is_local=self._durable is not None
        )

    def _children(self) -> list[epath.Path]:
        try:
            return list(self.path.iterdir())
        # The directory may be missing: a bucket has no folder without objects in it.
        except (FileNotFoundError, NotADirectoryError):
            return []

    @property
    def is_of_one_step(self) -> bool:
        """Whether the directory that was given is a step."""
        return self._step is not None

    def require_run(self) -> None:
        """Raises DirectoryError if the directory that was given is a step."""
        if self._step is not None:
            raise given_step.refused(self._step)

    # --- writing ---

    @stage("claim the directory")
    def claim(self) -> None:
        """Creates the directory, takes the lease, and checks that files can be written."""
        self.require_writable()
        with self._translated("create and write"):
            self._medium.make_folder(self.path)
            self.fence()
            self._medium.prove_writable()

    def runs(self) -> list[str]:
        """Checks the lease; returns the name of the run in a list; on a durable directory only."""
        with self._translated("read"):
            self.fence()
            return self.run_name.names()

    @stage("name the run")
    def join(self, present: Sequence[str], name: str) -> None:
        """Adds a name to those ``present``; in a local tier, first deletes other runs' steps."""
        with self._translated("write"):
            self.fence()
            if self._durable is not None:
                for committed in self.run_name.others(present, self._visible()):
                    logger.info("%s: removing step %d of another run", self.path, committed.step)
                    self.delete(committed)
            self.run_name.write([*present, name])

    def leave_tiers(self) -> None:
        """Removes the run's name, because local tiers will lack the steps that are saved now."""
        with self._translated("write"):
            self.fence()
            self.run_name.forget()

    @stage("check the lease")
    def fence(self) -> None:
        """Takes the lease at the first call; later calls check that this program still holds it."""
        self._lease.hold()

    @property
    def token(self) -> str:
        """The name of this program's hold of the lease; "" while it holds none."""
        return self._lease.token

    def is_leased_by(self, token: str) -> bool:
        """Returns whether the hold of this name, perhaps another process's, is of this lease."""
        with self._translated("read"):
            try:
                return token.encode() in self._medium.read(self.path / lease.NAME)
            except FileNotFoundError:
                return False

    def release(self) -> None:
        """Releases the lease, so that other programs may write."""
        self._lease.release()
        self.let_go()

    def let_go(self) -> None:
        """Forgets what failed saves left, because other programs may count or replace it now."""
        self._medium.let_go()
        self._left_out.clear()

    @stage("recover the directory")
    def recover(self) -> None:
        """Finishes renames and removes files that killed processes or failed saves left.

        What can be neither renamed nor removed stays. Raises if a failed commit cannot be undone.
        """
        with self._translated("clean up"):
            self.fence()
            self.take_back()
            visible = self._visible()
            abandoned = self.abandonment.certain_among(visible)
            self.set_aside(abandoned)
            for committed in visible:
                if committed.is_incoming and committed not in abandoned:
                    self.settle(committed)
            leftovers.remove_among(self._children())
            self._medium.let_go()

    def path_for(self, step: int) -> epath.Path:
        """Returns the path at which a save writes the files of ``step`` before the commit."""
        self.run_name.restore(self.fence)
        return self._medium.begin(step, self._lease.token)

    @stage("commit the folder")
    def publish(self, step: int, written: epath.Path) -> CommittedStep:
        """Makes step N visible; on local storage as ``N``, or as ``incoming-N`` if ``N`` exists."""
        path = self._medium.publish(step, written, self.fence)
        if not (commit_time := commit_record.time_or_none(path)):
            raise DirectoryError(
                f"{path}: this step was written, but its commit record cannot be read: another "
                "program removes or changes files in this directory. End that program.",
                path=path,
                step=step,
            )
        self._medium.keep(path)
        return CommittedStep(step, path, commit_time, is_incoming=path.name != str(step))

    def take_back(self) -> None:
        """Undoes what was begun or published but not committed, so that it is no step."""
        self._medium.take_back(self.fence)

    @stage("settle a step")
    def settle(self, incoming: CommittedStep) -> CommittedStep:
        """Renames ``incoming-N`` to ``N``, if possible and not in a bucket; returns the step."""
        path, final = incoming.path, self._medium.final_path(incoming.path, incoming.step)
        if final == path or (final.exists() and self._move_aside(final, incoming.step)):
            return incoming
        if self._medium.set_aside(path, final, self.fence):
            return incoming
        return dataclasses.replace(incoming, path=final, is_incoming=False)

    def record_saved(self, durable: CommittedStep, summary: Mapping[str, Any]) -> None:
        """Records that a save succeeded; keeps the summary, so that it need not be read again."""
        self._left_out.pop(durable.step, None)
        self._summaries.remember(durable, summary)

    @stage("set steps aside")
    def set_aside(self, abandoned: Sequence[CommittedStep]) -> list[CommittedStep]:
        """Renames abandoned steps to ``abandoned-N``, or deletes them; returns those that stay."""
        return self._staying(abandoned, self._leave)

    def prune(self, doomed: Sequence[CommittedStep]) -> list[CommittedStep]:
        """Deletes steps; returns those that stay."""
        return self._staying(doomed, self._delete)

    def _staying(
        self, steps: Sequence[CommittedStep], leave: Callable[[CommittedStep], OSError | None]
    ) -> list[CommittedStep]:
        for committed in steps:
            known = self.staying.pop(committed.key, None)
            if refusal := known if storage_errors.is_refusal(known) else leave(committed):
                self.staying[committed.key] = refusal
        return [committed for committed in steps if committed.key in self.staying]

    def warn_of_staying(self, steps: Sequence[CommittedStep]) -> None:
        """Warns once: says how many bytes of these steps stay, why, and what helps."""
        if steps and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: steps %s can be neither deleted nor set aside, because the system renames no "
                "such folder: %s",
                self.path,
                ", ".join(str(s.step) for s in steps),
                self._why_they_stay(steps),
            )

    def _why_they_stay(self, steps: Sequence[CommittedStep]) -> str:
        reason = self.staying[steps[-1].key]
        num_bytes = sum(f.num_bytes for s in steps for f in self._medium.files(s.path))
        text = f"{storage_errors.said(reason)}. {num_bytes} bytes stay. "
        if not storage_errors.is_refusal(reason):
            return f"{text}The next save tries again. {storage_errors.advice(reason)}".rstrip()
        copy = f"Copy the run to a disk of its own: torchax-ckpt copy {self.path} NEW_DIRECTORY"
        return (
            f"{text}This happens to folders that came with a container's image (in a lower layer "
            "of overlayfs), and to folders of another user in one with the sticky bit. "
            f"{'Give LocalTier a folder on a disk of its own' if self._durable else copy}"
        )

    def _leave(self, committed: CommittedStep) -> OSError | None:
        if committed.key in self.failed:
            logger.info("%s: removing: its save failed", committed.path)
            return self._delete(committed)
        return self._move_aside(committed.path, committed.step) if committed.path.exists() else None

    def _move_aside(self, path: epath.Path, step: int) -> OSError | None:
        if self._durable is not None:
            logger.info("%s: removing step %d: abandoned, or not on all hosts", self.path, step)
            return self._medium.delete(path, step, self.fence)
        target = first_free(self.path, (f"abandoned-{step}",))
        logger.debug("setting aside step %d of an abandoned branch as %s", step, target)
        return self._medium.set_aside(path, target, self.fence)

    def delete(self, committed: CommittedStep) -> None:
        """Deletes a step; raises DirectoryError if it stays, because a disk does not rename it."""
        self.staying.pop(committed.key, None)  # tries again
        if self.prune([committed]):
            raise DirectoryError(
                f"{committed.path} can be neither deleted nor set aside, because the system "
                f"renames no such folder: {self._why_they_stay([committed])}",
                path=committed.path,
            ) from self.staying[committed.key]

    @stage("delete a step")
    def _delete(self, committed: CommittedStep) -> OSError | None:
        """Renames a step or removes its mark, so that it is no step; then removes its files."""
        self.require_writable()
        with self._translated("delete from"):
            self.fence()
            refusal = self._medium.delete(committed.path, committed.step, self.fence)
        if refusal is None:
            self.forget(committed)
        return refusal

    def forget(self, committed: CommittedStep) -> None:
        """Drops the facts in memory about a step that is not listed any more."""
        self._summaries.forget(committed)
        self.verified.forget(committed)

    def require_writable(self) -> None:
        """Raises DirectoryError if this was opened with ``read_only``, or is no place for a run."""
        self.require_run()
        if self._is_read_only:
            raise DirectoryError(
                f"{self.path}: cannot be written: CheckpointOptions(read_only=True) was given",
                path=self.path,
            )
        self._medium.refuse_unsafe()

    def _translated(self, action: str) -> contextlib.AbstractContextManager[None]:
        return storage_errors.translated(action, self.path)
