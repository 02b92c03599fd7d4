"""Copies the newest durable step of a run to its mirror, again and again, on a thread of its own.

A copy may take longer than many saves. The step is chosen when a copy begins, and is kept until the
copy is whole, so the newest step in the mirror is at most two copies old, however often the run
saves. Once ``attach`` has compared the run with the mirror, saves and training never wait for the
mirror, and no failure of it reaches them.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from etils import epath

from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LeaseError,
    StepNotFoundError,
)
from torchax_ckpt.options import Mirror
from torchax_ckpt.runtime import progress
from torchax_ckpt.runtime.background import Flag, Task
from torchax_ckpt.runtime.preemption import Preemption
from torchax_ckpt.runtime.user_messages import fields
from torchax_ckpt.saving.mirroring.copying import Copy, Dropped
from torchax_ckpt.saving.mirroring.mirror_directory import MirrorDirectory
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.lineage import Branch
from torchax_ckpt.storage.medium import storage_errors

logger = logging.getLogger(__name__)

# The pause after a copy that failed; ``close`` ends it.
_RETRY_SECS = 10.0
# At the end of a run: how often a copy that fails is tried again, and the pause before.
_LAST_TRIES, _LAST_PAUSE_SECS = 3, 1.0
# How long a copy that is dropped may go on until it has sent the piece that it is sending.
_DROPPING_SECS = 5.0
# What is left of the grace after a SIGTERM when a copy is dropped, and when no thread waits for it.
_MARGIN_SECS, _LAST_SECS = 2.0, 1.0


class Mirroring:
    """The copies of one run to its mirror, made by the process that claims the mirror.

    Does nothing until then, and so nothing without ``settings``. ``branch`` returns the branch of
    the run's durable steps. ``tell`` takes the name, the step and the values of an event.
    ``preemption`` knows when a SIGTERM ends this process.
    """

    def __init__(
        self,
        settings: Mirror | None,
        source: epath.Path,
        branch: Callable[[], Branch],
        tell: Callable[..., None],
        preemption: Preemption,
    ) -> None:
        self._source, self._here = source, branch
        self._tell, self._preemption = tell, preemption
        self._mirror = None if settings is None else MirrorDirectory(settings, source)
        self.is_joined = False  # whether copies may begin
        self.copy_secs = 0.0  # of the last copy
        self._held: CommittedStep | None = None
        self._copy: Copy | None = None
        self._damaged: set[Key] = set()  # steps of the run that cannot be copied
        self._failing = ""  # the kind of the last failure
        self._num_failures = 0  # in a row
        self._starting = threading.Lock()
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._task: Task | None = None
        self._closing, self._is_over = Flag(), False
        self._ends_secs = math.inf  # when ``close`` has waited long enough

    @property
    def mirror(self) -> MirrorDirectory:
        """The mirror of a run that has one."""
        assert self._mirror is not None
        return self._mirror

    @property
    def is_claimed(self) -> bool:
        """Whether this process holds the lease of a mirror."""
        return self._mirror is not None and self._mirror.is_claimed

    # --- on the training thread, and on that of a save ---

    def wake(self) -> None:
        """Has the thread look for a step to copy; starts the thread if it does not run."""
        if not self.is_joined or not self.is_claimed:
            if self._closing.is_set:  # an exit handler has saved this step after the end
                self._say()
            return
        with self._starting:
            if self._task is None and not self._closing.is_set:
                task = Task("mirror", self._run)
                try:
                    task.start()
                    self._task = task
                except RuntimeError as error:  # too many threads; the next step tries again
                    text = "%s: no thread copies to the mirror: %s"
                    logger.warning(text, self._source, error)
        self._wakeups.put(None)

    def holds(self, committed: CommittedStep) -> bool:
        """Returns whether a step must stay, because it is being copied."""
        held = self._held
        return held is not None and held.key == committed.key

    @property
    def in_flight(self) -> str:
        """What is being copied, as text; "" if nothing is."""
        copy = self._copy
        return f"the copy of step {copy.committed.step} to the mirror" if copy else ""

    @property
    def values(self) -> dict[str, Any]:
        """The newest step in the mirror, and its age, as values of an event; {} without one."""
        newest = None if self._mirror is None else self._mirror.newest
        if newest is None:
            return {}
        return {"mirrored_step": newest.step, "mirrored_age_secs": newest.age_secs}

    # --- on the thread of copies ---

    def _run(self) -> None:
        num_tries = 0
        try:
            while num_tries < _LAST_TRIES and not self._is_over:
                committed = None
                is_last = self._closing.is_set  # before the choice, which then sees every save
                try:
                    committed = self.choose()
                    has_copied = committed is not None and self.copy(committed)
                except Dropped:  # the next choice is the last step, or none
                    continue
                except Exception as error:  # bucket clients raise errors of their own
                    num_tries += self._closing.is_set
                    is_gone = isinstance(error, StepNotFoundError)  # the run has gone back
                    if not is_gone:
                        self._fail(committed, error)
                    if self._closing.wait(_LAST_PAUSE_SECS if is_gone else _RETRY_SECS):
                        time.sleep(_LAST_PAUSE_SECS)
                    continue
                if not has_copied:
                    if is_last:
                        break
                    self._wakeups.get()
                    while not self._wakeups.empty():  # those of a long copy ask for one look
                        self._wakeups.get()
        finally:  # nobody else releases it, so that nobody writes there without it
            self.mirror.release()

    def choose(self) -> CommittedStep | None:
        """Returns the newest step that is not known to be damaged; None without one.

        No save deletes it until it is copied, so the call of ``copy`` for it must follow.
        """
        # Again, until it stays the newest: a save may have deleted it before it was held.
        while (newest := None if self._is_over else self._here().newest) != self._held:
            self._held = newest
        if newest is not None and newest.key in self._damaged:
            self._held = None
        return self._held

    def copy(self, committed: CommittedStep) -> bool:
        """Copies a step, and deletes what the mirror need not keep; returns whether it was sent."""
        copy = self._copy = Copy(committed)
        if self._is_over:  # ``drop`` has not seen this copy
            copy.drop()
        try:
            if not self.mirror.copy(copy, self._here()):
                return False
        finally:
            self._copy = self._held = None
        self._succeed(copy)
        self.mirror.tidy()
        return True

    def _succeed(self, copy: Copy) -> None:
        path, step = self.mirror.path, copy.committed.step
        self.copy_secs, self._failing = copy.secs, ""
        if self._num_failures:
            text = "%s: the mirror works again after %d failed copies"
            logger.info(text, path, self._num_failures)
            self._num_failures = 0
        secs, sent_bytes = copy.secs, copy.sent_bytes
        self._tell("mirrored", step, mirror_secs=secs, sent_bytes=sent_bytes, **self.values)
        text = "%s: step %d is in the mirror (%.1f MB in %.2f s)"
        logger.debug(text, path, step, sent_bytes / 1e6, secs)

    def _fail(self, committed: CommittedStep | None, error: Exception) -> None:
        """Counts a failed copy; logs it, unless the last one failed for the same reason."""
        self._num_failures += 1
        self.mirror.list_again()
        if committed is not None and isinstance(error, CorruptCheckpointError):
            self._damaged.add(committed.key)
        path = self.mirror.path
        is_lost = isinstance(error, LeaseError)
        kind = "lease" if is_lost else storage_errors.kind(error)
        text = storage_errors.explained(error, path)
        step = None if committed is None else committed.step
        self._tell("mirror_failed", step, error=text)
        level = logging.DEBUG if kind == self._failing else logging.WARNING
        again = "" if is_lost else " Saves go on, and so do attempts."
        what = "the newest step" if committed is None else f"step {step}"
        message = "%s: %s cannot be copied to the mirror: %s%s"
        is_known = isinstance(error, (CheckpointError, OSError))
        extra = fields(step=step, path=path)
        logger.log(level, message, path, what, text, again, extra=extra, exc_info=not is_known)
        self._failing = kind

    # --- at the end ---

    def close(self) -> None:
        """Waits until the newest step is in the mirror, or the time is over; says what is missing.

        After a SIGTERM, the time is what is left of its grace. The mirror's lease is released when
        the thread of copies ends, which is no later, unless storage does not answer.
        """
        task = self._task
        if not self.is_claimed or (task is not None and task.pid != os.getpid()):
            return
        if self._closing.is_set and task is not None:  # another thread closes this, or has given up
            self._wait(task)
            return
        if not self._is_over:
            self._ends_secs = time.monotonic() + self.mirror.settings.close_timeout_secs
        self._closing.set()
        if task is None:
            self.mirror.release()
        else:
            self._wakeups.put(None)
            self._wait(task)
        if self.is_joined:
            self._say()

    def _wait(self, task: Task) -> None:
        def left_secs() -> float:
            left = self._ends_secs - time.monotonic()
            left = min(left, self._preemption.left_secs - _MARGIN_SECS)
            self._drop_for_the_last(left)
            return left

        progress.wait(task.ended, left_secs, self._where)
        if not task.ended.is_set:
            self.drop()
            left = self._preemption.left_secs - _LAST_SECS
            task.ended.wait(max(0.0, min(_DROPPING_SECS, left)))

    def drop(self) -> None:
        """Ends the copy in flight, if any, and begins no other; ``close`` then waits no longer."""
        self._is_over, self._ends_secs = True, time.monotonic()
        self._wakeups.put(None)
        if (copy := self._copy) is not None:
            copy.drop()

    def _drop_for_the_last(self, left_secs: float) -> None:
        """Drops the copy in flight if only the last step fits into the time without it."""
        copy = self._copy
        if copy is None or copy.is_dropped or copy.secs_left == math.inf:
            return
        last = self._here().newest
        if last is None or copy.committed.key == last.key:
            return
        needed = self.copy_secs or copy.secs + copy.secs_left
        if copy.secs_left + needed > left_secs >= needed:
            copy.drop()
            text = "%s: step %d is not copied to the end, because step %d then fits into the time"
            logger.warning(text, self.mirror.path, copy.committed.step, last.step)

    def _where(self) -> str:
        if (copy := self._copy) is None or copy.total_bytes == 0:
            return "finishing the mirror"
        done = 100 * copy.sent_bytes / max(1, copy.total_bytes)
        left = "" if copy.secs_left == math.inf else f", {copy.secs_left:.0f} s to go"
        return f"finishing {self.in_flight}: {done:.0f} %{left}"

    def _say(self) -> None:
        """Logs which step is safe, and which is not."""
        here, there, path = self._here(), self.mirror.branch, self.mirror.path
        if there is None or not here.steps:
            return
        last, safe = here.steps[-1], "it is empty"
        if there.steps:
            theirs = there.steps[-1]
            safe = f"its newest step is {theirs.step}, saved {theirs.age()} ago"
            if theirs.key == last.key:
                logger.info("%s: the mirror has the newest step, %d", path, last.step)
                return
            if there.continues(last, here.lineage_of(last)):
                text = "%s: the mirror continues step %d, the newest of this run: %s"
                logger.info(text, path, last.step, safe)
                return
        why = "its copies fail" if self._failing else "it did not arrive in time"
        logger.warning(
            "%s: the mirror does not have step %d, which only %s has: %s; %s. Copy it with "
            "torchax-ckpt mirror %s %s --once, or start the program again",
            path,
            last.step,
            self._source,
            "no thread has copied it" if self._task is None else why,
            safe,
            self._source,
            path,
            extra=fields(step=last.step, path=path),
        )
