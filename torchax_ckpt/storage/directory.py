"""Owns the run directory: which steps are there, which count, how they come, move and go.

    DIRECTORY/120/             a committed step
    DIRECTORY/incoming-120/    a committed step whose number an abandoned one still occupies
    DIRECTORY/abandoned-120/   a step of an abandoned branch, set aside; never read again
    DIRECTORY/deleting-120/    a step that is being removed
    DIRECTORY/120.orbax-...    a save in flight, or one that was killed

After going back to an older step, the newer ones are abandoned once a new step is durable. The
new step itself says so in its summary, by the commit times of the steps it abandons: a process
killed before it could set them aside does not bring them back.

Listing and reading change nothing. One process at a time may write.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath
from orbax.checkpoint import v1 as ocp

from torchax_ckpt.errors import DirectoryError, StepNotFoundError
from torchax_ckpt.storage.policies import CheckpointInfo

logger = logging.getLogger(__name__)

SUMMARY = "summary"
_COLLAPSED = re.compile(r"g(?:c)?s:/([^/].*)")
_INCOMING = re.compile(r"incoming-(\d+)")
_LEFTOVER = re.compile(r"deleting-\d+.*|(incoming-)?\d+\.orbax-checkpoint-tmp.*")
# What Orbax writes last into a step on a bucket.
_COMMIT_MARK = "commit_success.txt"
_STEP_NAMES = ocp.path.step.standard_name_format()


@dataclasses.dataclass(frozen=True)
class CommittedStep:
    """A step that can be read.

    Attributes:
      step: completed optimizer steps.
      path: its directory.
      commit_timestamp_nsecs: when it was committed; also what tells it from another step of the
        same number.
      is_incoming: whether it waits to take the place of an abandoned step.
    """

    step: int
    path: epath.Path
    commit_timestamp_nsecs: int
    is_incoming: bool = False


class StepDirectory:
    """The directory of one run.

    Args:
      directory: a local path or ``gs://bucket/prefix``.

    Raises:
      DirectoryError: it is a file, or not a path.
    """

    def __init__(self, directory: Any) -> None:
        try:
            self.path = epath.Path(directory)
        except KeyError:
            scheme = str(directory).partition("://")[0]
            raise DirectoryError(
                f"{directory}: {scheme}:// is not supported; use a local path or gs://",
                path=str(directory),
            ) from None
        except TypeError as error:
            raise DirectoryError(
                f"directory: expected a path or a gs:// URL, found {directory!r:.100}"
            ) from error
        if isinstance(directory, os.PathLike) and (match := _COLLAPSED.fullmatch(str(directory))):
            raise DirectoryError(
                f"{directory}: pathlib takes a bucket for a local path; give a string instead: "
                f"gs://{match[1]}",
                path=directory,
            )
        scheme, separator, _ = str(self.path).partition("://")
        if not separator:
            self.path = self.path.expanduser().absolute()
        elif scheme not in ("gs", "gcs"):
            raise DirectoryError(
                f"{self.path}: {scheme}:// is not supported; use a local path or gs://",
                path=self.path,
            )
        with self._translated("read"):
            if self.path.exists() and not self.path.is_dir():
                raise DirectoryError(
                    f"{self.path}: expected a directory, found a file. Give a path of its own to "
                    "every run.",
                    path=self.path,
                )
        self._summaries: dict[tuple[int, int], Mapping[str, Any]] = {}
        self._doubtful: set[int] = set()

    # --- reading ---

    def steps(self) -> list[CommittedStep]:
        """The committed steps that count, oldest first; reads the directory anew."""
        with self._translated("read"):
            found = list(self._visible())
        if not found:
            return []
        newest = max(found, key=lambda s: s.commit_timestamp_nsecs)
        abandoned = self._abandoned_by(newest)
        counted = {
            s.step: s
            for s in sorted(found, key=lambda s: s.is_incoming)
            if (s.step, s.commit_timestamp_nsecs) not in abandoned
        }
        return [counted[step] for step in sorted(counted)]

    def find(self, step: int) -> CommittedStep:
        """The step of this number.

        Raises:
          StepNotFoundError: there is none; names those there are.
        """
        steps = self.steps()
        for committed in steps:
            if committed.step == step:
                return committed
        there = ", ".join(str(s.step) for s in steps) or "none"
        raise StepNotFoundError(
            f"{self.path}: no checkpoint at step {step}; there are: {there}",
            step=step,
            path=self.path,
        )

    def metrics(self, committed: CommittedStep) -> dict[str, Any]:
        """The metrics saved with a step; {} if there are none."""
        return dict(self._summary(committed).get("metrics") or {})

    def info(self, committed: CommittedStep) -> CheckpointInfo:
        """The step as policies see it."""
        return CheckpointInfo(
            committed.step,
            committed.path,
            metadata=None,
            commit_timestamp_nsecs=committed.commit_timestamp_nsecs,
            metrics=self.metrics(committed),
        )

    def _visible(self) -> Iterator[CommittedStep]:
        if not self.path.exists():
            return
        for found in _STEP_NAMES.find_all(self.path):
            # Orbax takes any directory with a number for a name; only a commit leaves a time.
            if found.commit_timestamp_nsecs is not None:
                yield CommittedStep(found.step, found.path, found.commit_timestamp_nsecs)
            elif found.step not in self._doubtful and any(found.path.iterdir()):
                self._doubtful.add(found.step)
                logger.warning(
                    "%s looks like a step, but its commit record cannot be read: ignoring it",
                    found.path,
                )
        for child in self._children():
            if match := _INCOMING.fullmatch(child.name):
                metadata = self._commit_time(child)
                if metadata is not None:
                    yield CommittedStep(int(match[1]), child, metadata, is_incoming=True)

    def _children(self) -> list[epath.Path]:
        try:
            return list(self.path.iterdir())
        except FileNotFoundError:  # a bucket has no directories, only what is in them
            return []

    def _commit_time(self, path: epath.Path) -> int | None:
        try:
            return ocp.checkpointables_metadata(path).commit_timestamp_nsecs
        except (ValueError, FileNotFoundError):
            return None  # not committed

    def _summary(self, committed: CommittedStep) -> Mapping[str, Any]:
        key = (committed.step, committed.commit_timestamp_nsecs)
        if key not in self._summaries:
            try:
                loaded = ocp.load_checkpointables(committed.path, {SUMMARY: None})[SUMMARY]
            except (KeyError, ValueError, OSError):
                loaded = None  # not written by this package, or unreadable: restoring will tell
            self._summaries[key] = loaded if isinstance(loaded, dict) else {}
        return self._summaries[key]

    def _abandoned_by(self, committed: CommittedStep) -> set[tuple[int, int]]:
        # Only the newest commit can name steps that are still in place: whoever writes next
        # first finishes setting them aside.
        listed = self._summary(committed).get("abandons") or []
        return {(int(step), int(time)) for step, time in listed}

    # --- writing ---

    def claim(self) -> None:
        """Creates the directory and proves that it can be written.

        Raises:
          DirectoryError: it cannot be created or written.
        """
        with self._translated("create and write"):
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".torchax_ckpt_write_test"
            probe.write_text("")
            probe.unlink()

    def recover(self) -> None:
        """Finishes or removes what a killed process left behind. For the one writer only."""
        with self._translated("clean up"):
            visible = list(self._visible())
            if visible:
                newest = max(visible, key=lambda s: s.commit_timestamp_nsecs)
                abandoned = self._abandoned_by(newest)
                self.set_aside(
                    s for s in visible if (s.step, s.commit_timestamp_nsecs) in abandoned
                )
                for committed in visible:
                    if committed.is_incoming:
                        self.settle(committed)
            for child in self._children():
                if _LEFTOVER.fullmatch(child.name):
                    logger.info("removing %s, left behind by a killed save or delete", child)
                    child.rmtree()

    def path_for(self, step: int) -> epath.Path:
        """Where to save a step: under its number, or beside the abandoned step that has it."""
        final = self.path / _STEP_NAMES.build_name(step)
        if not final.exists():
            return final
        if "://" in str(self.path) and not (final / _COMMIT_MARK).exists():
            # A killed save: on a bucket, where nothing can be renamed, steps are written in place.
            final.rmtree()
            return final
        return self.path / f"incoming-{step}"

    def settle(self, incoming: CommittedStep) -> CommittedStep:
        """Moves an incoming step to its own name; what was there is set aside."""
        final = self.path / _STEP_NAMES.build_name(incoming.step)
        if final.exists():
            self._move_aside(final, incoming.step)
        incoming.path.rename(final)
        return dataclasses.replace(incoming, path=final, is_incoming=False)

    def committed(self, step: int, path: epath.Path) -> CommittedStep:
        """The step that was just committed at this path."""
        is_incoming = path.name != _STEP_NAMES.build_name(step)
        if is_incoming:
            commit_time = self._commit_time(path)
        else:
            commit_time = _STEP_NAMES.find_step(self.path, step).commit_timestamp_nsecs
        if commit_time is None:
            raise DirectoryError(f"{path}: was written, but is not committed", path=path, step=step)
        return CommittedStep(step, path, commit_time, is_incoming)

    def know_summary(self, committed: CommittedStep, summary: Mapping[str, Any]) -> None:
        """Takes the summary that was just written, which then need not be read."""
        self._summaries[committed.step, committed.commit_timestamp_nsecs] = summary

    def set_aside(self, abandoned: Iterable[CommittedStep]) -> None:
        """Renames steps of an abandoned branch, so that nothing resumes from them."""
        for committed in abandoned:
            if committed.path.exists():
                self._move_aside(committed.path, committed.step)

    def _move_aside(self, path: epath.Path, step: int) -> None:
        target = self.path / f"abandoned-{step}"
        count = 1
        while target.exists():
            count += 1
            target = self.path / f"abandoned-{step}-{count}"
        logger.warning("setting aside step %d of an abandoned branch as %s", step, target)
        path.rename(target)

    def delete(self, committed: CommittedStep) -> None:
        """Removes a step: first its name or commit mark, then its files.

        A process killed in between leaves nothing that looks like a checkpoint.
        """
        with self._translated("delete from"):
            if "://" in str(self.path):
                (committed.path / _COMMIT_MARK).unlink(missing_ok=True)
                committed.path.rmtree()
                return
            doomed = self.path / f"deleting-{committed.step}"
            if doomed.exists():
                doomed.rmtree()
            if committed.path.exists():  # else somebody else has removed it
                committed.path.rename(doomed)
                doomed.rmtree()

    def prune(self, keep: Sequence[bool], steps: Sequence[CommittedStep]) -> list[int]:
        """Deletes the steps that are not kept; returns their numbers."""
        doomed = [s for s, kept in zip(steps, keep, strict=True) if not kept]
        for committed in doomed:
            self.delete(committed)
        return [s.step for s in doomed]

    @contextlib.contextmanager
    def _translated(self, action: str) -> Iterator[None]:
        """Turns the operating system's refusals into a DirectoryError that says what to do."""
        try:
            yield
        except DirectoryError:
            raise
        except OSError as error:
            raise DirectoryError(
                f"cannot {action} {self.path}: {error}. Check that the path is a directory and "
                "that this process may use it.",
                path=self.path,
            ) from error
