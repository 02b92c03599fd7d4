"""Reads the JSON of a committed step; turns read failures into this package's errors.

A step's summary is small JSON with its metrics and the steps that it abandons.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DirectoryError,
    ForeignCheckpointError,
)
from torchax_ckpt.runtime.background import Executor, Task
from torchax_ckpt.runtime.lazily import jax
from torchax_ckpt.runtime.progress import Pace
from torchax_ckpt.storage.directory import assets, commit_record
from torchax_ckpt.storage.directory.committed_step import (
    ASSETS,
    MANIFEST,
    SUMMARY,
    CommittedStep,
)
from torchax_ckpt.storage.medium import containment, medium, seals, storage_errors

T = TypeVar("T")

logger = logging.getLogger(__name__)

# How long an error waits for the file's name, which is read from the same storage.
_SEARCH_SECS = 10.0
# Stands for a missing or damaged summary.
_LOST: Mapping[str, Any] = types.MappingProxyType({})


def beyond_memory(
    committed: CommittedStep, needed: int, least: int, name: str | None = None
) -> CheckpointError:
    """Returns the error for leaves that exceed host memory; damage if storage has under ``least``.

    All numbers are in bytes.
    """
    path = committed.path
    on_storage = sum(file.num_bytes for file in medium.of(path).files(path))
    return containment.too_large(committed.step, path, "leaves", needed, least, on_storage, name)


def read_manifest(committed: CommittedStep) -> Any:
    """Returns the manifest of a step as JSON, after a check that the step's summary is intact."""
    if committed.has_lost_record:
        with as_corrupt(committed, "commit record"):
            commit_record.read_time(committed.path)
    with as_corrupt(committed, "manifest"):
        is_there = (committed.path / MANIFEST).exists()
        is_ours = is_there or {MANIFEST, SUMMARY} <= commit_record.item_names(committed.path)
    if not is_ours:
        raise ForeignCheckpointError(
            f"step {committed.step} in {committed.path} has no manifest: it was not written by "
            "torchax_ckpt, so its arrays cannot be matched with torch's names. Read it with "
            "TorchaxCheckpointer.load(step, abstract_state), and assign the result yourself.",
            step=committed.step,
            path=committed.path,
        )
    with as_corrupt(committed, SUMMARY):
        seals.read_sealed(committed.path / SUMMARY)
    with as_corrupt(committed, MANIFEST):
        return seals.read_sealed(committed.path / MANIFEST)


def read_assets(committed: CommittedStep, seal: str | None) -> dict[str, str]:
    """Returns the assets of a step, name -> text; none if the manifest has no ``seal`` for them."""
    if seal is None:
        return {}
    with as_corrupt(committed, ASSETS):
        return assets.parsed(seals.read_sealed(committed.path / ASSETS, seal))


@contextlib.contextmanager
def as_corrupt(committed: CommittedStep, what: str) -> Iterator[None]:
    """Turns errors of a block that reads ``what`` into CorruptCheckpointError.

    If storage cannot be read now, the step may be intact, and the error is a DirectoryError.
    """
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # Orbax wraps failures in many types, Exception among them
        if type(error).__name__ == "JaxRuntimeError":  # by name, because JAX may not be there
            raise
        if storage_errors.is_unavailable(error):
            raise committed.error(
                DirectoryError,
                f"its {what} cannot be read now, which does not mean that the step is damaged: "
                f"{storage_errors.explained(error, committed.path)} Then try again, or read an "
                "older step.",
                file=storage_errors.file_of(error),
            ) from error
        raise committed.error(
            CorruptCheckpointError,
            f"cannot read its {what}: {storage_errors.said(error)}. If the step is damaged, read "
            "another step, or a copy of this one.",
            file=storage_errors.file_of(error),
        ) from error


def await_read(
    committed: CommittedStep,
    name: str,
    read: Any,
    pace: Pace,
    place: Callable[[], object] = lambda: None,
) -> None:
    """Waits for the read of an array; if all reads are slow, raises or, on a disk, logs."""
    while not pace.wait(read):
        got = f"{pace.bytes} bytes in {pace.secs:.0f} s"
        # A program that only reads steps must not start JAX, nor take the host's accelerators.
        is_one_of_several = "jax" in sys.modules and jax.distributed.is_initialized()
        process = jax.process_index() if is_one_of_several else 0
        problem = (
            f"process {process} waits for {name} in {soon(place) or committed.path}; all "
            f"its reads together got {got}"
        )
        try:
            medium.of(committed.path).wait_longer(
                f"step {committed.step} in {committed.path}", problem
            )
        except TimeoutError as error:
            raise committed.error(DirectoryError, str(error), name) from None
        pace.restart()


def soon(search: Callable[[], T]) -> T | None:
    """Returns the result of a search for an error's text, or None if it takes long."""
    results: list[T | None] = [None]
    task = Task("torchax_ckpt-search", lambda: results.append(search()))
    with contextlib.suppress(RuntimeError):  # too many threads: the text then names the step
        task.start()
    task.ended.wait(_SEARCH_SECS)
    return results[-1]


class Summaries:
    """Reads the summaries of a directory's steps, and keeps each of them in memory.

    In a local tier (``is_local``), a summary that cannot be read now counts as damaged.
    """

    def __init__(self, *, is_local: bool = False) -> None:
        self._is_local = is_local
        self._known: dict[tuple[int, int], Mapping[str, Any]] = {}

    def remember(self, committed: CommittedStep, summary: Mapping[str, Any]) -> None:
        """Keeps a just-written summary in memory, so that it need not be read from storage."""
        self._known[committed.key] = summary

    def forget(self, committed: CommittedStep) -> None:
        """Drops a deleted step's summary from memory, because a run may save millions of steps."""
        self._known.pop(committed.key, None)

    def field(self, committed: CommittedStep, name: str) -> dict[str, Any]:
        """Returns a field of a step's summary that is an object, such as its metrics; else {}."""
        found = self._of(committed).get(name)
        return dict(found) if isinstance(found, dict) else {}

    def of(self, committed: CommittedStep) -> Mapping[str, Any] | None:
        """Returns the summary of a step; None if it is missing or damaged."""
        summary = self._of(committed)
        return None if summary is _LOST else summary

    def read(self, steps: Sequence[CommittedStep]) -> list[Mapping[str, Any] | None]:
        """Returns the summaries of steps, as ``of`` does."""
        with Executor() as pool:  # each is a round trip to a bucket
            return [*pool.map(self.of, steps)]

    def _of(self, committed: CommittedStep) -> Mapping[str, Any]:
        summary = self._known.get(committed.key)
        if summary is None:
            try:
                medium.of(committed.path).require_contained(committed.path, committed.step)
                loaded = seals.read_sealed(committed.path / SUMMARY)
            except Exception as error:
                if storage_errors.is_unavailable(error) and not self._is_local:
                    raise
                if not committed.path.exists():
                    return {}  # the program that writes here has moved the step meanwhile
                loaded = None  # another program wrote it, or it is damaged: restoring reports that
            summary = loaded if isinstance(loaded, dict) else _LOST
            self._known[committed.key] = summary
        return summary
