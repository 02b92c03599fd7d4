"""Reads what the manifests of earlier steps say about unchanged arrays."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence

from torchax_ckpt.errors import CheckpointError
from torchax_ckpt.layout.manifest import Manifest
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.stored.stored_step import parse_manifest

logger = logging.getLogger(__name__)

# How many steps a run searches for the other copy when it starts. The newest two steps have
# different copies, except if a save wrote all arrays again.
_NUM_SEARCHED = 4


def manifests(steps: Sequence[CommittedStep]) -> Iterator[tuple[CommittedStep, Manifest]]:
    """Yields the newest of some steps with their manifests, newest first.

    Leaves out the steps whose manifest cannot be read.

    Args:
      steps: oldest first.
    """
    for committed in reversed(steps[-_NUM_SEARCHED:]):
        try:
            manifest = parse_manifest(committed)
        except (OSError, CheckpointError) as error:
            logger.info("nothing is taken over from step %d: %s", committed.step, error)
        else:
            yield committed, manifest


def manifest_for(committed: CommittedStep, durable: RunDirectory) -> Manifest | None:
    """Returns the manifest that says what is still in a run that continues from a step.

    For a durable step, this is its own manifest. For a local step, it is the manifest of the newest
    durable step before it that has databases of unchanged arrays, because the first durable save
    takes these over, and because a host may lack its local step. If no durable step has any, it is
    the manifest of the local step.

    Args:
      committed: the step that the run continues from.
      durable: the directory of the durable tier.

    Returns:
      The manifest; None if there is none, or none can be read.
    """
    if committed.path.parent == durable.path:
        return next((manifest for _, manifest in manifests([committed])), None)
    steps: list[CommittedStep] = []
    try:
        steps = [s for s in durable.steps() if s.step <= committed.step]
    except (OSError, CheckpointError) as error:
        logger.info("nothing is taken over from %s: %s", durable.path, error)
    found = itertools.chain(manifests(steps), manifests([committed]))
    return next((manifest for _, manifest in found if manifest.unchanged), None)
