"""Watches the directory of a run, and publishes the steps that are due as folders.

A follower only reads the run's directory. It takes no lease, because the program that trains must
never wait for it; so a step may be deleted while the follower reads it, and is then skipped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    ForeignCheckpointError,
    MismatchError,
    SelectionError,
    StepNotFoundError,
    UnsupportedLeafError,
)
from torchax_ckpt.policies.preservation import ranking, why_unranked
from torchax_ckpt.publishing.folder_form import FolderForm
from torchax_ckpt.publishing.published_folders import Published, PublishedFolders
from torchax_ckpt.runtime.background import Flag
from torchax_ckpt.saving import run_history
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import location
from torchax_ckpt.stored import named_steps
from torchax_ckpt.stored.stored_step import StoredStep

logger = logging.getLogger(__name__)

# From one look at a run to the next, if nothing shows before that there is a new step.
POLL_SECS = 10.0
# From one look at the time of the run's folder, which each commit changes, to the next.
_NOTICE_SECS = 0.03
# How long a folder stays after it was replaced: a reader has this time to open its files.
GRACE_SECS = 600.0
# Errors of one step, after which another step may be published.
_SKIPPED = (
    StepNotFoundError,
    CorruptCheckpointError,
    ForeignCheckpointError,
    UnsupportedLeafError,
)


class _Aborted(Exception):  # noqa: N818 - ends a publication from inside, and is no failure
    """``Follower.aborted`` was set while a folder was being written."""


class Follower:
    """Publishes steps of a run as folders, one at each look; ``Publisher`` has the same arguments.

    A folder appears at once or not at all, also if this program is killed; its next start goes on
    where it was. ``stopped`` ends ``follow``; ``aborted`` also a publication in flight, which
    leaves nothing. ``follow`` looks when the time of the run's folder changes.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        out: str | os.PathLike[str],
        form: FolderForm,
        *,
        every: int | None = None,
        best: str | None = None,
        keep: int = 3,
    ) -> None:
        if every is not None and best is not None:
            raise ValueError("every and best exclude each other: give one of them")
        self._every = _at_least_one("every", 1 if every is None else every)
        self._best = best
        if best is not None and ranking(best) is None:
            raise ValueError(f"best: expected METRIC, METRIC:min or METRIC:max, found {best!r:.80}")
        self._keep = _at_least_one("keep", keep)
        self._path = location.resolve(run)
        self.out = location.resolve(out)
        if location.is_within(self.out, self._path):
            raise ValueError(
                f"out: expected a folder outside of the run's directory, found {self.out}; "
                "nothing but the run itself writes there"
            )
        self._run = RunDirectory(self._path, read_only=True)
        self._run.require_run()
        self._form = form
        self.stopped, self.aborted = Flag(), Flag()
        self._told: Callable[[], object] = lambda: None
        self._noticed: object = None
        self._folders = PublishedFolders(
            self.out, str(location.real(self._path)), form.format, self._wrote
        )
        # With their paths: a step that was renamed while it was read can be read again.
        self._skipped: set[CommittedStep] = set()
        self._has_warned = False

    def listen_to(self, told: Callable[[], object]) -> None:
        """Has a change of what ``told`` returns show, too, that there may be a new step."""
        self._told = told

    def follow(
        self, *passing: type[Exception], publishes_last: bool = False
    ) -> Iterator[Published]:
        """Publishes what is due until ``stopped`` is set; yields each new folder.

        Errors of the kinds ``passing`` are logged, once while they repeat. ``publishes_last``
        publishes the newest step at the end, whatever ``every``, unless ``aborted``.
        """
        logged, is_at_end = "", False
        while not is_at_end:
            is_at_end = self._waited()
            if self.aborted.is_set or (is_at_end and not publishes_last):
                return
            try:
                new = self.publish_due(is_at_end=is_at_end)
            except passing as error:
                text = f"{type(error).__name__}: {error}"
                if text != logged and not self.aborted.is_set:
                    is_known = isinstance(error, CheckpointError)
                    said = "cannot publish to %s now: %s"
                    logger.warning(said, self.out, text, exc_info=not is_known)
                logged = text
                continue
            logged = ""
            if new is not None:
                yield new

    def publish_due(self, *, is_at_end: bool = False) -> Published | None:
        """Publishes the step that is due, if any, and deletes folders whose grace has passed.

        The first call locks ``out`` until ``close``; raises LeaseError if another program has.
        """
        self._folders.open()
        self._folders.retire(self._keep, GRACE_SECS)
        while (committed := self._due(1 if is_at_end else self._every)) is not None:
            try:
                new = self._publish(committed)
            except _Aborted:
                return None
            except _SKIPPED as error:
                self._skipped.add(committed)
                logger.warning("not published to %s: %s", self.out, error)
                continue
            self._folders.retire(self._keep, GRACE_SECS)
            return new
        return None

    def close(self) -> None:
        """Unlocks ``out``. May be called twice."""
        self._folders.close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _waited(self) -> bool:
        """Waits until there may be a new step, or ``stopped`` is set; returns whether it is."""
        end = time.monotonic() + POLL_SECS
        while not (is_stopped := self.stopped.wait(min(_NOTICE_SECS, POLL_SECS))):
            before, self._noticed = self._noticed, (self._changed_nsecs(), self._told())
            if self._noticed != before or time.monotonic() >= end:
                break
        return is_stopped

    def _changed_nsecs(self) -> int | None:
        """Returns when the run's folder last changed; None in a bucket, and if there is none."""
        with contextlib.suppress(OSError):
            return os.stat(self._path).st_mtime_ns
        return None

    def _due(self, every: int) -> CommittedStep | None:
        found = self._run.steps()
        self._skipped &= set(found)
        steps = [s for s in found if not s.has_lost_record and s not in self._skipped]
        published = self._of_same_branch(found)
        if self._best is None:
            last = max((folder.step for folder in published), default=0)
            newest = steps[-1].step // every if steps else 0
            if newest <= last // every:
                return None
            return next(committed for committed in steps if committed.step // every == newest)
        infos = run_history.checkpoint_infos(self._run, steps)
        best = named_steps.rule_of(self._best, steps, lambda committed: self._run)
        assert best is not None, "checked when this was made"
        problem, is_misspelled = why_unranked([best], [info.metrics or {} for info in infos])
        if is_misspelled and not self._has_warned:
            self._has_warned = True
            logger.warning("%s: %s", self._path, problem)
        ranked = best.ranked(infos)
        if not ranked:
            return None
        if known := best.ranked(published):
            new, old = (each.metrics[best.metric] for each in (ranked[0], known[0]))
            if not (new < old if best.mode == "min" else new > old):
                return None
        return next(committed for committed in steps if committed.step == ranked[0].step)

    def _of_same_branch(self, steps: Sequence[CommittedStep]) -> list[Published]:
        """Returns the published folders, less those of steps that the run is known to have left."""
        # A step that was committed after a published one with the same or a higher number is on
        # another branch.
        return [
            folder
            for folder in self._folders.published
            if not any(
                s.commit_timestamp_nsecs > folder.commit_timestamp_nsecs and s.step <= folder.step
                for s in steps
            )
        ]

    def _publish(self, committed: CommittedStep) -> Published:
        metrics, stored = self._run.metrics(committed), StoredStep(committed)
        try:
            weights = self._form.weights_of(stored)
            texts = self._form.texts_of(stored)
            if self._form.format == "hf" and texts is not None and not texts.has_config:
                raise MismatchError(
                    f"step {committed.step} in {committed.path} stores no config of the model, "
                    "without which transformers cannot load a folder: save the config with the "
                    "steps (attach a model of transformers), or choose the format safetensors",
                    step=committed.step,
                    path=committed.path,
                )
            with self._folders.writing(committed, metrics) as draft:
                self._form.write(stored, weights, texts, draft, self._wrote)
        except (SelectionError, UnsupportedLeafError) as error:
            error.message = f"step {committed.step}: {error.message}"
            raise
        return self._folders.published[-1]

    def _wrote(self, num_bytes: int) -> None:
        if self.aborted.is_set:
            raise _Aborted


def _at_least_one(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected a number, found {value!r:.80}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, found {value}")
    return value
