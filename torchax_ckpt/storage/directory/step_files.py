"""Reads the JSON of a committed step; turns read failures into this package's errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DirectoryError,
    ForeignCheckpointError,
)
from torchax_ckpt.storage.directory import commit_record
from torchax_ckpt.storage.directory.committed_step import ASSETS, MANIFEST, SUMMARY, CommittedStep
from torchax_ckpt.storage.medium import assets, location, seals, storage_errors


def read_manifest(committed: CommittedStep) -> Any:
    """Returns the manifest of a step, as JSON; before, checks that the step's summary is intact.

    Raises:
      ForeignCheckpointError: the step has no manifest: bare Orbax wrote it.
      CorruptCheckpointError: the manifest, the summary or the commit record cannot be read, or is
        not what was written.
      DirectoryError: one of these files cannot be read now.
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
    """Returns the assets of a step, as a dict from name to text.

    Args:
      committed: the step.
      seal: the digest of the assets, from the step's manifest; None if the step has no assets.

    Raises:
      CorruptCheckpointError: the assets cannot be read, or are not what was written.
      DirectoryError: the assets cannot be read now.
    """
    if seal is None:
        return {}
    with as_corrupt(committed, ASSETS):
        return assets.parsed(seals.read_sealed(committed.path / ASSETS, seal))


@contextlib.contextmanager
def as_corrupt(committed: CommittedStep, what: str) -> Iterator[None]:
    """Turns errors of the ``with`` block into CorruptCheckpointError or DirectoryError.

    DirectoryError says that storage cannot be read now. CorruptCheckpointError says that the step
    is damaged. This package's own errors, MemoryError and JaxRuntimeError are raised unchanged.

    Args:
      committed: the step that the block reads.
      what: the part of the step that the block reads, for the message.
    """
    try:
        yield
    except (CheckpointError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # Orbax wraps failures in many types, Exception among them
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
