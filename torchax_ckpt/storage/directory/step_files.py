"""Reads the JSON of a committed step; turns read failures into this package's errors."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DirectoryError,
    ForeignCheckpointError,
)
from torchax_ckpt.runtime.background import Task
from torchax_ckpt.runtime.lazily import jax
from torchax_ckpt.runtime.progress import Pace
from torchax_ckpt.storage.directory import commit_record
from torchax_ckpt.storage.directory.committed_step import (
    ASSETS,
    MANIFEST,
    STATE,
    SUMMARY,
    CommittedStep,
)
from torchax_ckpt.storage.medium import assets, location, seals, storage_errors

logger = logging.getLogger(__name__)

# How long an error waits for the file's name, which is read from the same storage.
_SEARCH_SECS = 10.0


def read_manifest(committed: CommittedStep) -> Any:
    """Returns the manifest of a step, as JSON; before, checks that the step's summary is intact.

    Raises ForeignCheckpointError if bare Orbax wrote the step; CorruptCheckpointError, or
    DirectoryError for "not now", if manifest, summary or commit record cannot be read.
    """
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
    """Turns errors of a block that reads ``what`` of a step into errors of this package.

    DirectoryError says that storage cannot be read now, CorruptCheckpointError that the step is
    damaged. This package's own errors, MemoryError and JaxRuntimeError are raised unchanged.
    """
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # Orbax wraps failures in many types, Exception among them
        if type(error).__name__ == "JaxRuntimeError":  # by name, because JAX may not be there
            raise
        cause = storage_errors.said(error)
        if storage_errors.is_unavailable(error):
            advice = storage_errors.advice(error, is_bucket=location.is_bucket(committed.path))
            raise DirectoryError(
                f"step {committed.step} in {committed.path}: its {what} cannot be read now, which "
                f"does not mean that the step is damaged: {cause}. {advice} Then try again, or "
                "read an older step.",
                step=committed.step,
                path=committed.path,
            ) from error
        raise CorruptCheckpointError(
            f"step {committed.step} in {committed.path}: cannot read its {what}: {cause}. If the "
            "step is damaged, read another step, or a copy of this one.",
            step=committed.step,
            path=committed.path,
        ) from error


def await_read(
    committed: CommittedStep,
    name: str,
    read: Any,
    pace: Pace,
    place: Callable[[], str | None] = lambda: None,
) -> None:
    """Waits for the future of an array's read; if all reads are slow, raises or, on a disk, logs.

    ``place`` searches for the file, and may itself hang.
    """
    while not pace.wait(read):
        got = f"{pace.bytes} bytes in {pace.secs:.0f} s"
        # A program that only reads steps must not start JAX, nor take the host's accelerators.
        is_one_of_several = "jax" in sys.modules and jax.distributed.is_initialized()
        process = jax.process_index() if is_one_of_several else 0
        problem = (
            f"step {committed.step} in {committed.path}: process {process} waits for "
            f"{name} in {_soon(place) or committed.path / STATE}; all its reads together got {got}"
        )
        if location.is_bucket(committed.path):
            raise DirectoryError(
                f"{problem}, less than CheckpointOptions(min_read_bytes_per_sec=...) allows for "
                "process_timeout_secs. The step may be intact: check the network and the service's "
                "status, then try again.",
                step=committed.step,
                path=committed.path,
                key_path=name,
            )
        logger.warning("%s. Still waiting: check the disk or the file server.", problem)
        pace.restart()


def _soon(search: Callable[[], str | None]) -> str | None:
    found: list[str | None] = [None]
    task = Task("torchax_ckpt-search", lambda: found.append(search()))
    task.start()
    task.ended.wait(_SEARCH_SECS)
    return found[-1]
