"""Stores a run's name in its directories, so that no run uses the local tier of another run.

A ramdisk may outlive the run, whose path the next run may get. A run with a local tier therefore
has a name, in the file ``run`` of its durable directory and, after the word ``local``, of its local
directories. A run deletes steps of other runs only from directories with this word, never from one
that a user gave as a local tier by mistake.

A host may also be absent while the run goes on, and return with steps that the run has abandoned.
Every program that saves therefore gives the run a new name, which an absent host does not learn.
The local directories get it first, beside the present name, so that they have the name of the
durable directory whenever the program is killed. A program that saves without a local tier removes
the name from the durable directory, so that no run uses the old local tiers.

A program replaces the name by compare-and-swap, because a bucket's server may carry out a request
late, and syncs it before the next change. The file may be empty or torn nevertheless, on a medium
that loses what was synced. The summary of each step therefore repeats what the file said at the
save. In a local tier without a valid file, those steps count whose summaries name the run. If the
file of the durable directory is torn, the summary of its newest step gives the name.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.runtime import user_messages
from torchax_ckpt.runtime.stages import stage
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.step_files import Summaries
from torchax_ckpt.storage.medium import medium
from torchax_ckpt.storage.medium.compare_and_swap import AtomicRecord, Conflict, Seen

NAME = "run"
_LOCAL = "local "
_RUN = re.compile(rf"(?P<local>{_LOCAL})?(?P<names>[0-9a-f]{{32}}( [0-9a-f]{{32}})?)")
# What a loss of power leaves of a valid content: nothing, its beginning, or zeros for its end.
_TORN = re.compile(r"(local |local|loca|loc|lo|l)?[0-9a-f \0]{0,71}")
# The field of a step's summary that repeats the content of the file.
SUMMARY_FIELD = "run"


def names(directory: epath.Path, *, is_local: bool = False) -> list[str]:
    """Returns the valid names in a file ``run``; in a local tier, the present and the next one."""
    return _names_in(_text(directory), is_local)


class RunName:
    """The name of the run in a durable directory or, if ``durable`` is given, in a local tier."""

    def __init__(
        self,
        directory: epath.Path,
        summaries: Summaries,
        visible: Callable[[], list[CommittedStep]],
        durable: RunName | None,
    ) -> None:
        self._directory = directory
        self._summaries = summaries
        self._visible = visible  # returns all committed steps of the directory
        self._durable = durable
        self._content = ""  # what this program wrote into the file
        self._has_warned = False

    def names(self) -> list[str]:
        """Returns the run's name in a durable directory; [] if the run has none."""
        present = names(self._directory)
        if present or not self._is_torn():
            return present
        in_order = sorted(self._visible(), key=lambda s: s.commit_timestamp_nsecs)
        present = [name for said in self._said(in_order[-1:]) for name in _names_in(said, False)]
        self._warn(
            "The newest step of this directory tells the name of the run."
            if present
            else "No step of this directory tells the name of the run, so no local step counts."
        )
        return present

    def ours(self, steps: list[CommittedStep], run: Sequence[str] | None) -> list[CommittedStep]:
        """Returns the steps of the run that has these names; all if ``run`` is None."""
        return steps if run is None else self._of_run(steps, run)

    def others(self, run: Sequence[str], steps: list[CommittedStep]) -> list[CommittedStep]:
        """Returns a local tier's steps of other runs; DirectoryError if some were never local."""
        ours = {s.key for s in self._of_run(steps, run)}
        others = [s for s in steps if s.key not in ours]
        if names(self._directory, is_local=True):
            return others
        # A local step may have been copied to anywhere, so its summary alone is no proof.
        said = self._said(others) if self._is_torn() else [None] * len(others)
        foreign = [s for s, text in zip(others, said, strict=True) if not _names_in(text, True)]
        if foreign:
            there = ", ".join(map(str, sorted(s.step for s in foreign)))
            raise DirectoryError(
                f"{self._directory}: expected an empty directory or the local tier of a run, found "
                f"steps {there} that were not saved to a local tier. LocalTier(path) would delete "
                "these steps: give LocalTier a directory of its own.",
                path=self._directory,
            )
        return others

    @stage("write the name")
    def write(self, run: Sequence[str]) -> None:
        """Writes the name, or a local tier's present and next one, if no other program does."""
        self._content = _LOCAL * (self._durable is not None) + " ".join(run)
        with self._exchanged() as (record, seen):
            record.swap(seen, self._content.encode())
            record.sync_name()

    def restore(self, fence: Callable[[], None]) -> None:
        """Writes this program's file again, if it was removed meanwhile."""
        if self._content and not (self._directory / NAME).exists():
            fence()
            self.write(_names_in(self._content, self._durable is not None))

    def forget(self) -> None:
        """Removes the run's name from its durable directory: no local tier belongs to the run."""
        if names(self._directory):
            with self._exchanged() as (record, seen):
                if seen is not None:
                    record.remove(seen)

    def for_summary(self) -> dict[str, str]:
        """Returns the field for the summaries of this program's steps; {} without a name."""
        return {SUMMARY_FIELD: self._content} if self._content else {}

    def _of_run(self, steps: list[CommittedStep], run: Sequence[str]) -> list[CommittedStep]:
        """Returns those of a local tier's steps that belong to a run."""
        if present := names(self._directory, is_local=True):
            return steps if set(present) & set(run) else []
        # A step that has the new name beside the present one shows which name earlier steps have.
        known, ours = set(run), set()
        newest_first = sorted(steps, key=lambda s: s.commit_timestamp_nsecs, reverse=True)
        for step, said in zip(newest_first, self._said(newest_first), strict=True):
            names_said = _names_in(said, True)
            if known & set(names_said):
                known |= set(names_said)
                ours.add(step.key)
        if self._is_torn():
            of_run, others = (
                ", ".join(map(str, sorted(s.step for s in steps if (s.key in ours) == is_of_run)))
                or "none"
                for is_of_run in (True, False)
            )
            self._warn(
                "The steps of a local tier name their run themselves. Steps of this run, which "
                f"count: {of_run}. Other steps, which the next save removes: {others}."
            )
        return [s for s in steps if s.key in ours]

    def _said(self, steps: Sequence[CommittedStep]) -> list[Any]:
        """Returns what the summary of each step says of its run; None if it says nothing."""
        summaries: list[Mapping[str, Any] | None] = self._summaries.read(steps)
        return [None if summary is None else summary.get(SUMMARY_FIELD) for summary in summaries]

    def _is_torn(self) -> bool:
        text = _text(self._directory)
        return text is not None and bool(_TORN.fullmatch(text)) and not _RUN.fullmatch(text)

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            user_messages.warn(
                f"{self._directory / NAME}: expected the name of a run, found "
                f"{_text(self._directory)!r:.80}, as a loss of power may leave it. {what} The next "
                "save writes the file again."
            )

    @contextlib.contextmanager
    def _exchanged(self) -> Iterator[tuple[AtomicRecord, Seen | None]]:
        """Yields the record of a directory's file ``run``, and the content that it has now."""
        path = self._directory / NAME
        foreign = DirectoryError(
            f"{path}: expected the name of a run, found something else. A run with a local tier "
            "keeps its name in this file: rename the file, or give the run another directory.",
            path=self._directory,
        )
        if not medium.of(path).is_plain(path):
            raise foreign
        record = medium.of(path).record(path)
        try:
            seen = record.read()
            text = "" if seen is None else seen.content.decode(errors="replace")
            if not _RUN.fullmatch(text) and not _TORN.fullmatch(text):
                raise foreign
            yield record, seen
        except Conflict:
            raise DirectoryError(
                f"{path}: another program has just replaced the run's name in this file. Let only "
                "one program save to the directory.",
                path=self._directory,
            ) from None
        finally:
            record.close()


def _text(directory: epath.Path) -> str | None:
    """Returns the content of the file ``run``; None if no regular file of text is there."""
    try:
        if not medium.of(directory).is_plain(directory / NAME):
            return None
        return (directory / NAME).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return None


def _names_in(text: Any, is_local: bool) -> list[str]:
    """Returns the names in a content of the file ``run``; [] if the content is not valid."""
    match = _RUN.fullmatch(text) if isinstance(text, str) else None
    return match["names"].split() if match and bool(match["local"]) == is_local else []
