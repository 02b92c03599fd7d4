"""Watches the directory of a run, and publishes the steps that are due as folders.

A follower only reads the run's directory. It takes no lease, because the program that trains must
never wait for it; so a step may be deleted while the follower reads it, and is then skipped.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
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
from torchax_ckpt.publishing.folder_form import FolderForm
from torchax_ckpt.publishing.published_folders import Published, PublishedFolders
from torchax_ckpt.publishing.rules import Rule
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import location
from torchax_ckpt.stored.stored_step import StoredStep

# Errors of one step, after which another step may be published.
_SKIPPED = (
    StepNotFoundError,
    CorruptCheckpointError,
    ForeignCheckpointError,
    UnsupportedLeafError,
)


class Follower:
    """Publishes steps of a run: each call of ``publish_due`` publishes at most one.

    Each folder appears at once or not at all, also if this program is killed. At its next start it
    goes on where it was. ``OUT/latest`` names the folder that was published last.

    Args:
      run: the directory of the run, or ``gs://bucket/prefix``; need not exist yet.
      out: the folder to publish to, on this host: new, empty, or one that was published to before.
        Not in the directory of the run. All folders in it are of one run and one format.
      rule: which steps are due.
      form: what the folders contain.
      keep: how many folders to keep, those published last.
      grace_secs: how long a folder stays after it was replaced, that is, after it ceased to be
        among those to keep.
      clock: returns the time in seconds since 1970.
      on_skipped: called with the reason why a step is not published: it was deleted meanwhile, is
        damaged, has values that are too large for the form's dtype, or bare Orbax wrote it.
      on_bytes: called with the number of bytes of each piece that was written. Whatever it raises
        ends the publication, and leaves nothing of it.

    Attributes:
      out: the folder to publish to.

    Raises:
      ValueError, TypeError: an argument cannot work.
      DirectoryError: ``run`` is no path, or has a scheme that is not supported.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        out: str | os.PathLike[str],
        rule: Rule,
        form: FolderForm,
        *,
        keep: int = 3,
        grace_secs: float = 600.0,
        clock: Callable[[], float] = time.time,
        on_skipped: Callable[[CheckpointError], None] = lambda error: None,
        on_bytes: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep: expected at least one folder, found {keep!r:.80}")
        if not grace_secs >= 0:
            raise ValueError(f"grace_secs: expected seconds, 0 or more, found {grace_secs!r:.80}")
        self._path = location.resolve(run)
        self.out = _local_path(out)
        identity = str(self._path)
        if not location.is_bucket(self._path):
            identity = os.path.realpath(self._path)
            inside = Path(identity)
            if Path(os.path.realpath(self.out)).is_relative_to(inside):
                raise ValueError(
                    f"out: expected a folder outside of the run's directory, found {self.out}; "
                    "nothing but the run itself writes there"
                )
        self._rule, self._form = rule, form
        self._keep, self._grace_secs = keep, grace_secs
        self._on_skipped, self._on_bytes = on_skipped, on_bytes
        self._folders = PublishedFolders(self.out, identity, form.format, clock)
        self._run: RunDirectory | None = None
        # With their paths: a step that was renamed while it was read can be read again.
        self._skipped: set[CommittedStep] = set()
        self._names: frozenset[str] | None = None  # in the run's directory, when nothing was due

    def publish_due(self, *, is_at_end: bool = False) -> Published | None:
        """Publishes the step that is due, and deletes folders whose grace has passed.

        The first call locks ``out`` until ``close``.

        Args:
          is_at_end: whether the run has ended, so that its newest step is published even if fewer
            steps than ``Every`` says have passed.

        Returns:
          The new folder; None if no step is due.

        Raises:
          LeaseError: another program publishes to ``out``.
          DirectoryError: the run cannot be read, or ``out`` cannot be written, at the moment; or
            ``out`` has folders of another run or format.
          MismatchError, SelectionError: the step does not have what the form needs.
          OutOfMemoryError: this host has too little memory.
        """
        self._folders.open()
        self._folders.retire(self._keep, self._grace_secs)
        names = self._listed()
        if names is not None and names == self._names and not is_at_end:
            return None
        rule = self._rule.at_end() if is_at_end else self._rule
        while (committed := self._due(rule)) is not None:
            try:
                new = self._publish(committed)
            except _SKIPPED as error:
                self._skipped.add(committed)
                self._on_skipped(error)
                continue
            self._folders.retire(self._keep, self._grace_secs)
            self._names = None
            return new
        self._names = names
        return None

    def close(self) -> None:
        """Unlocks ``out``. May be called twice."""
        self._folders.close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _listed(self) -> frozenset[str] | None:
        """Returns the names in the run's directory; None on a bucket.

        While they are the same, so are the steps: each commit and each deletion renames a folder.
        On a bucket, a step is completed by a file in its folder.
        """
        if location.is_bucket(self._path):
            return None
        with contextlib.suppress(OSError):
            return frozenset(os.listdir(self._path))
        return None

    def _due(self, rule: Rule) -> CommittedStep | None:
        if self._run is None:
            self._run = RunDirectory(self._path, read_only=True)
        steps = self._run.steps()
        self._skipped &= set(steps)
        sound = [s for s in steps if not s.has_lost_record and s not in self._skipped]
        return rule.due(sound, self._of_same_branch(steps), self._run.info)

    def _of_same_branch(self, steps: Sequence[CommittedStep]) -> list[Published]:
        """Returns the published folders, less those of steps that the run is known to have left.

        On one branch, later commits have greater numbers. A step that was committed after a
        published one, with the same number or a lower one, is on another branch.
        """
        return [
            folder
            for folder in self._folders.published
            if not any(
                s.commit_timestamp_nsecs > folder.commit_timestamp_nsecs and s.step <= folder.step
                for s in steps
            )
        ]

    def _publish(self, committed: CommittedStep) -> Published:
        assert self._run is not None
        metrics = self._run.metrics(committed)
        try:
            return self._write(StoredStep(committed, self._form.options()), metrics)
        except (SelectionError, UnsupportedLeafError) as error:
            error.message = f"step {committed.step}: {error.message}"
            raise

    def _write(self, stored: StoredStep, metrics: dict[str, Any]) -> Published:
        committed = stored.committed
        weights = self._form.weights_of(stored)
        texts = self._form.texts_of(stored)
        if self._form.format == "hf" and texts is not None and not texts.has_config:
            raise MismatchError(
                f"step {committed.step} in {committed.path} stores no config of the model, without "
                "which transformers cannot load a folder: give a folder that has config.json "
                "(config=), save the config with the steps (attach a model of transformers), or "
                "choose the format safetensors",
                step=committed.step,
                path=committed.path,
            )
        with self._folders.writing(
            committed.step, committed.commit_timestamp_nsecs, metrics
        ) as draft:
            self._form.write(stored, weights, texts, draft, self._on_bytes)
        return self._folders.published[-1]


def _local_path(out: str | os.PathLike[str]) -> Path:
    path = os.fspath(out)
    if not path or "://" in path or path.partition("/")[0].endswith(":"):
        raise ValueError(
            f"out: expected a folder on this host, found {path!r:.200}; folders appear at once by "
            "a rename, which buckets lack"
        )
    return Path(path).expanduser().absolute()
