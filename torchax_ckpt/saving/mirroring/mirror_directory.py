"""The directory of a mirror, for the program that holds its lease.

Steps of the mirror are abandoned only once the copy that abandons them is whole. While that copy is
coming, a file names its step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence

from etils import epath

from torchax_ckpt.errors import MirrorError
from torchax_ckpt.options import Mirror
from torchax_ckpt.policies import preservation
from torchax_ckpt.runtime import user_messages
from torchax_ckpt.runtime.user_messages import fields
from torchax_ckpt.saving.mirroring import copying
from torchax_ckpt.saving.mirroring.copying import Copy
from torchax_ckpt.storage.directory import lease, lineage
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.lineage import Branch
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import location, medium, storage_errors

logger = logging.getLogger(__name__)

# The file of a mirror that names a step of the run, while the mirror's steps do not lead to it.
LEFT = "left"


def mirror_settings(
    given: str | os.PathLike[str] | Mirror | None,
    others: Collection[epath.Path],
    *,
    read_only: bool,
) -> Mirror | None:
    """Returns the settings of a mirror; MirrorError if it overlaps ``others``, or if read-only."""
    mirror = given if given is None or isinstance(given, Mirror) else Mirror(given)
    if mirror is None:
        return None
    if read_only:
        raise MirrorError(
            "mirror: expected None with CheckpointOptions(read_only=True), because a mirror is "
            "written to: omit one of them"
        )
    if mirror.preservation_policy is not None:
        policy = mirror.preservation_policy
        preservation.require_policy("preservation_policy", policy, "should_preserve")
    path = location.resolve(mirror.url, as_mirror=True)
    for other in others:
        if location.overlap(path, other):
            raise MirrorError(
                f"mirror: expected a directory or bucket apart from the run's, {other}, found "
                f"{path}: one is the other, or lies in it. Give a place on another disk or in a "
                "bucket, which survives the loss of this one",
                path=path,
            )
    return mirror


class MirrorDirectory:
    """The mirror of the run in ``source``; nothing is written there before ``claim``."""

    def __init__(self, settings: Mirror, source: epath.Path) -> None:
        self.settings, self._source = settings, source
        self.directory = RunDirectory(location.resolve(settings.url, as_mirror=True))
        self.directory.require_run()
        self.path = self.directory.path
        self.is_claimed = False
        self.branch: Branch | None = None  # of the mirror's steps, as they were seen last
        self._is_branch_new = False  # whether those are the steps that are there now
        self._is_left_there = False  # whether ``LEFT`` is
        self._known: set[Key] = set()  # of the steps that a copy may abandon
        self._sent: set[Key] = set()  # those of them that this program has copied
        self._untidy = ""  # why the last tidying failed

    def claim(self) -> None:
        """Takes the lease, and lists the steps; raises LeaseError if another program holds it."""
        if self.is_claimed:  # by an ``attach`` that then failed, or a save before it
            return
        if medium.of(self.path).is_missing(self.path):  # perhaps on a disk that is not mounted
            text = f"new mirror in {self.path}: it has no step"
            user_messages.tell(logger, text, fields(path=self.path))
        try:
            self.directory.claim()
        except BaseException:  # for example on a full disk, after the lease was written
            self.directory.release()
            raise
        self.is_claimed = True
        self._known |= {step.key for step in self._listed().steps}

    def release(self) -> None:
        """Releases the lease."""
        self.directory.release()
        self.is_claimed = False

    def list_again(self) -> None:
        """Has the next copy list the mirror, because one that failed may have arrived."""
        self._is_branch_new = False

    @property
    def newest(self) -> CommittedStep | None:
        """The newest step that was seen whose commit record is intact."""
        steps = self.branch.steps if self.branch else ()
        return next((s for s in reversed(steps) if not s.has_lost_record), None)

    def copy(self, copy: Copy, here: Branch) -> bool:
        """Copies a step of the run, whose branch is ``here``; returns whether it was sent.

        It is not if the mirror has it, continues it, or has a newer step that may be of its run.
        """
        committed = copy.committed
        there = self.branch if self.branch and self._is_branch_new else self._listed()
        abandoned = lineage.abandoned_by(committed, here, there, self._sent)
        if abandoned is None:
            return False
        # A step of an older version does not say what it left.
        is_decided = bool(here.lineage_of(committed)) or self.settings.on_conflict == "local"
        at = committed.commit_timestamp_nsecs
        if not is_decided and any(s.commit_timestamp_nsecs > at for s in abandoned):
            return False
        self._put(copy, abandoned)
        return True

    def _listed(self) -> Branch:
        """Cleans up the mirror and lists its steps, under its lease.

        The lease is taken again if nobody has it any more, for example because somebody has removed
        the mirror.
        """
        if not (self.path / lease.NAME).exists():
            self.directory.release()
            self.directory.claim()
        self.directory.recover()
        self._is_left_there = (self.path / LEFT).exists()
        self.branch, self._is_branch_new = self.directory.branch(), True
        return self.branch

    def _put(self, copy: Copy, abandoned: Sequence[CommittedStep]) -> None:
        committed = copy.committed
        if others := [step.step for step in abandoned if step.key not in self._known]:
            raise MirrorError(
                f"{self.path}: the mirror has the steps {others}, which another program has copied "
                f"there since this one began, and which do not lead to step {committed.step} of "
                f"{self._source}. Nothing was copied. End that program, or this one",
                step=committed.step,
                path=self.path,
            )
        self.directory.fence()
        if abandoned and not self._is_left_there:
            text = f"{committed.step} {committed.commit_timestamp_nsecs}"
            (self.path / LEFT).write_text(text, encoding="utf-8")
            self._is_left_there = True
        if self.settings.max_bytes is not None:
            copying.prune(self.directory, self.settings, copying.num_bytes(committed))
        self._known.add(committed.key)  # before, because a copy that fails may have arrived
        self.branch = copying.put(copy, self.directory, abandoned)
        self._sent.add(committed.key)
        there = {step.key for step in self.branch.steps}  # both hold no deleted steps
        self._known &= there
        self._sent &= there

    def tidy(self) -> None:
        """Sets aside what a copy abandons, deletes what need not stay; a failure is only logged."""
        try:
            if self._is_left_there:
                (self.path / LEFT).unlink(missing_ok=True)
                self._is_left_there = False
            self.directory.recover()
            copying.prune(self.directory, self.settings)
        except Exception as error:  # bucket clients raise errors of their own
            before, self._untidy = self._untidy, storage_errors.kind(error)
            level = logging.DEBUG if self._untidy == before else logging.WARNING
            text = "%s: steps that the mirror need not keep stay for now: %s"
            logger.log(level, text, self.path, storage_errors.explained(error, self.path))
        else:
            self._untidy = ""
