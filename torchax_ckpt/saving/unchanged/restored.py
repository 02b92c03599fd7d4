"""What a restore has read of a step's unchanged arrays: their digests, and the leaves made of them.

The leaves have the values that the step's manifest has digests of, because the restore has compared
them. So the next save need not look at them while they are the same objects.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from etils import epath

from torchax_ckpt.errors import CheckpointError
from torchax_ckpt.layout.manifest import Manifest
from torchax_ckpt.saving.unchanged import comparison, earlier_steps, known_databases
from torchax_ckpt.saving.unchanged.comparison import Taken
from torchax_ckpt.saving.unchanged.identities import Identity, Values
from torchax_ckpt.saving.unchanged.known_databases import Content
from torchax_ckpt.snapshot.host_array import HostArray
from torchax_ckpt.snapshot.sharding import stacked
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.writing import retained

References = Mapping[str, "weakref.ref[jax.Array]"]


def copy_in(manifest: Manifest) -> int | None:
    """Returns which copy of the unchanged arrays a step has; None if it has none."""
    return next((database.copy for database in manifest.unchanged.values()), None)


def databases(manifest: Manifest, references: References) -> list[dict[str, Identity]]:
    """Returns the databases of a step all of whose leaves were restored from it.

    Args:
      manifest: the manifest of the step.
      references: name -> reference, for the leaves that were restored and whose identity proves
        their values.
    """
    contents = dict(known_databases.contents_of(manifest))
    found = []
    for database in manifest.unchanged.values():
        identities = {
            name: identity
            for name in database.arrays
            if name in contents
            and (identity := _identity(name, contents[name], references)) is not None
        }
        if len(identities) == len(database.arrays):
            found.append(identities)
    return found


def other_copy(
    copy: int, steps: Sequence[CommittedStep], directory: epath.Path
) -> list[dict[str, Values]]:
    """Returns the databases of the newest step that has the other copy of the unchanged arrays.

    Args:
      copy: the copy that is not asked for.
      steps: the steps of the run that may have the other one, oldest first.
      directory: the directory of the run, which may have the other copy beside the steps.
    """
    for _, manifest in earlier_steps.manifests(steps):
        if copy_in(manifest) == 1 - copy:
            return _values(manifest)
    with contextlib.suppress(OSError, ValueError, RecursionError, CheckpointError):
        if copy_in(manifest := retained.read_manifest(directory)) == 1 - copy:
            return _values(manifest)
    return []


def _values(manifest: Manifest) -> list[dict[str, Values]]:
    contents = dict(known_databases.contents_of(manifest))
    return [
        {name: Values(contents[name].members, _taken(contents[name])) for name in database.arrays}
        for database in manifest.unchanged.values()
        if contents.keys() >= {*database.arrays}
    ]


def _taken(content: Content) -> Taken:
    return Taken(tuple(content.digests.block), comparison.encoded(content.digests.long or b""))


def _identity(name: str, content: Content, references: References) -> Identity | None:
    """Returns the identity of a stored array; None if its leaves were not restored as it is."""
    members = {leaf: references[leaf] for leaf in content.members if leaf in references}
    leaves = [reference() for reference in members.values()]
    first = leaves[0] if leaves else None
    if first is None or len(leaves) != len(content.members):
        return None
    is_stack = content.members != (name,)
    shape = (len(leaves), *first.shape) if is_stack else first.shape
    sharding = stacked(first.sharding) if is_stack else first.sharding
    if (
        sharding is None
        or shape != content.shape
        or any(
            leaf is None
            or (leaf.shape, leaf.dtype.name) != (first.shape, content.dtype)
            or leaf.sharding != first.sharding
            for leaf in leaves
        )
    ):
        return None
    announced = HostArray(content.shape, np.dtype(first.dtype), sharding, {})
    return Identity(members, announced, _taken(content))
