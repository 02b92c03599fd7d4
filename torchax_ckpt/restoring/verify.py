"""Verification: reads a whole step back, and records whether the step is intact.

The run uses this record to decide which steps to keep, and so do later runs in the directory.
"""

from __future__ import annotations

import contextlib

from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.restoring.fallback import reading
from torchax_ckpt.runtime import progress
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored.stored_step import StoredStep


def verify_step(
    committed: CommittedStep,
    directory: RunDirectory,
    processes: Processes,
    options: CheckpointOptions,
) -> None:
    """Compares every byte of a step with its digests, and records whether the step is intact.

    Args:
      committed: the step.
      directory: the directory that contains the step.
      processes: the processes that verify the step together. Each verifies a share of the step, or,
        in a local tier, its own host's part.
      options: how steps are read. Unless ``read_only`` is set, process 0 also marks the result in
        the directory, for later programs.

    Raises:
      CorruptCheckpointError: the step is damaged.
      ForeignCheckpointError: Orbax alone wrote the step, so it has no digests.
      StepNotFoundError: the step was deleted during the verification.
      DirectoryError: storage cannot read the step at present.
    """
    # In a local tier another host may have a step that this host lacks.
    is_here = not processes.is_per_host or committed.path.exists()
    verified = directory.verified
    try:
        with reading(committed, directory, processes):
            if is_here:
                with verified.noting_damage(committed):
                    _compare(committed, processes, options)
        if is_here:
            verified.note(committed, is_sound=True)
    except CorruptCheckpointError:
        if processes.is_first and not options.read_only:
            with contextlib.suppress(Exception):  # the damage is the error to raise
                verified.mark(directory.steps())  # others may share the damaged file
        raise
    finally:
        if processes.is_first and not options.read_only:
            verified.mark([committed])


def _compare(committed: CommittedStep, processes: Processes, options: CheckpointOptions) -> None:
    stored = StoredStep(committed, allow_part=True)
    with progress.bar(f"step {committed.step}", lambda: stored.stored_bytes) as on_bytes:
        stored.verify(options, processes, on_bytes=on_bytes)
