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
from jax.sharding import Sharding

from torchax_ckpt.errors import CheckpointError
from torchax_ckpt.layout.manifest import Manifest
from torchax_ckpt.saving.unchanged import comparison, earlier_steps, known_databases
from torchax_ckpt.saving.unchanged.comparison import Taken
from torchax_ckpt.saving.unchanged.identities import Identity
from torchax_ckpt.saving.unchanged.known_databases import Content
from torchax_ckpt.snapshot.host_array import HostArray
from torchax_ckpt.snapshot.sharding import stacked
from torchax_ckpt.storage.arrays import block_digests
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.writing import retained

References = Mapping[str, "weakref.ref[jax.Array]"]


def copy_in(manifest: Manifest) -> int | None:
    """Returns which copy of the unchanged arrays a step has; None if it has none."""
    return next((database.copy for database in manifest.unchanged.values()), None)


def identities(database: Mapping[str, Content], references: References) -> dict[str, Identity]:
    """Returns stored name -> identity, for the arrays of a database that were restored as stored.

    Args:
      database: stored name -> content.
      references: name -> reference, for the leaves that were restored and whose identity proves
        their values.
    """
    found = {name: _identity(name, content, references) for name, content in database.items()}
    return {name: identity for name, identity in found.items() if identity is not None}


def other_copy(
    copy: int, steps: Sequence[CommittedStep], directory: epath.Path
) -> list[dict[str, Content]]:
    """Returns the databases of the newest step that has the other copy of the unchanged arrays.

    Args:
      copy: the copy that is not asked for.
      steps: the steps of the run that may have the other one, oldest first.
      directory: the directory of the run, which may have the other copy beside the steps.
    """
    for _, manifest in earlier_steps.manifests(steps):
        if copy_in(manifest) == 1 - copy:
            return [database for _, database in known_databases.databases_of(manifest)]
    with contextlib.suppress(OSError, ValueError, RecursionError, CheckpointError):
        if copy_in(manifest := retained.read_manifest(directory)) == 1 - copy:
            return [database for _, database in known_databases.databases_of(manifest)]
    return []


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
    if (long := _digests_here(content, sharding)) is None:
        return None
    announced = HostArray(content.shape, np.dtype(first.dtype), sharding, {})
    taken = Taken(tuple(content.digests.block), comparison.encoded(long))
    return Identity(members, announced, taken)


def _digests_here(content: Content, sharding: Sharding) -> bytes | None:
    """Returns the long digests of a stored array, with those of other processes' blocks set to 0.

    A process must not answer for a block that another process has, whose array may be another
    object by then.

    Returns:
      The digests; None if a shard of this process has only a part of some block.
    """
    shape, block, long = content.shape, content.digests.block, content.digests.long or b""
    if sharding.is_fully_addressable:
        return long
    grid = block_digests.grid_shape(shape, block)
    is_here = np.zeros(grid, bool)
    for index in sharding.addressable_devices_indices_map(shape).values():
        where = []
        for along, length, size in zip(index or (), block, shape, strict=True):
            start, stop, _ = along.indices(size)
            if start % length or (stop % length and stop != size):
                return None
            where.append(slice(start // length, -(-stop // length)))
        is_here[tuple(where)] = True
    rows = np.frombuffer(long, np.uint8).reshape(*grid, 16)
    return np.where(is_here[..., None], rows, 0).astype(np.uint8).tobytes()
