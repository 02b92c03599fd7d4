"""What the databases of unchanged arrays in the steps of a run hold."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from etils import epath

from torchax_ckpt.layout.digests import Digests
from torchax_ckpt.layout.manifest import Manifest
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.storage.arrays import block_digests
from torchax_ckpt.storage.arrays.chunking import AnyArray
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.writing import databases, host_batches

logger = logging.getLogger(__name__)

# Smaller arrays share a database, because each database takes some milliseconds. If one array of a
# database changes, all of its arrays are written again.
_DATABASE_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class Content:
    """What a stored array holds.

    Attributes:
      members: the leaves in the array, in order.
      shape, dtype: of the stored array.
      digests: the digests of its blocks; with long digests if the array is in a database of
        unchanged arrays.
    """

    members: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    digests: Digests


@dataclasses.dataclass(frozen=True)
class KnownDatabase:
    """A database of unchanged arrays in a step of this run.

    Attributes:
      step: the key of the step; None for the folder ``retained`` knows.
      name: the name of the database in the step.
      contents: stored name -> content, for the arrays in the database.
      is_verified: whether this run wrote the database, or read and compared it.
    """

    step: Key | None
    name: str
    contents: Mapping[str, Content]
    is_verified: bool


def is_sound(stored: KnownDatabase, folder: epath.Path) -> bool:
    """Reads a database that this run does not know; returns whether it may be taken over."""
    if not databases.has_only(folder, stored.contents):
        logger.warning("%s has other arrays than it should: they are written again", folder)
        return False
    for name, content in stored.contents.items():
        if not databases.holds(folder, name, content.shape, content.dtype, content.digests):
            logger.warning("%s is damaged: the unchanged arrays are written again", folder)
            return False
    return True


def contents_of(manifest: Manifest) -> Iterator[tuple[str, Content]]:
    """Yields stored name and content of each array of a step that has digests that fit."""
    for name, (shape, dtype) in manifest.stored(manifest.leaves()).items():
        digests = manifest.digests.get(name)
        if digests is not None and block_digests.fit(digests, shape):
            yield name, Content(members_of(manifest.plan, name), shape, dtype, digests)


def members_of(plan: Plan, name: str) -> tuple[str, ...]:
    """Returns the leaves in a stored array, in order."""
    return plan.stacks.get(name) or (name,)


def distinct(stored: Iterable[KnownDatabase]) -> list[KnownDatabase]:
    """Returns each of the databases once."""
    return list({(s.step, s.name): s for s in stored}.values())


def is_equal(content: Content, plan: Plan, name: str, array: AnyArray | None) -> bool:
    """Fetches an array; returns whether it is what a database holds under the same name."""
    if (
        array is None
        or isinstance(array, np.ndarray)
        or content.members != members_of(plan, name)
        or (content.shape, content.dtype) != (tuple(array.shape), array.dtype.name)
    ):
        return False
    block = content.digests.block
    host = host_batches.fetched(array)
    parts = host.parts
    # A step of another mesh may have blocks of another shape.
    if any(n % b for part in parts.values() for n, b in zip(part.shape, block, strict=True)):
        parts = {(0,) * host.ndim: np.asarray(host)}
    return block_digests.take_long(content.shape, block, parts) == content.digests.long


def packed(arrays: Mapping[str, AnyArray]) -> Iterator[tuple[str, ...]]:
    """Divides arrays into groups for one database each; yields the names in each group."""
    part: list[str] = []
    nbytes = 0
    for name, array in arrays.items():
        size = array.size * array.dtype.itemsize
        if part and nbytes + size > _DATABASE_BYTES:
            yield tuple(part)
            part, nbytes = [], 0
        part.append(name)
        nbytes += size
    if part:
        yield tuple(part)
