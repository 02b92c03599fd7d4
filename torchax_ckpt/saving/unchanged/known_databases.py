"""What the databases of unchanged arrays in the steps of a run hold."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from torchax_ckpt.layout.digests import Digests
from torchax_ckpt.layout.manifest import Manifest
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.storage.arrays import block_digests, chunking
from torchax_ckpt.storage.arrays.chunking import AnyArray
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.writing.databases import File

# Smaller arrays share a database, because each database takes some milliseconds. If one array of a
# database changes, all of its arrays are written again. On several processes, this is the most that
# one process writes to a database.
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
      processes: as in ``Database``.
      files: the files of each folder of the database: name below the folder -> file, as they were
        when this run had written, taken over or read the database; empty if it has done none.
    """

    step: Key | None
    name: str
    contents: Mapping[str, Content]
    is_verified: bool
    processes: tuple[int, ...] | None = None
    files: Sequence[Mapping[str, File]] = ()

    @property
    def num_bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.size for files in self.files for file in files.values())


def contents_of(manifest: Manifest) -> Iterator[tuple[str, Content]]:
    """Yields stored name and content of each array of a step that has digests that fit."""
    for name, (shape, dtype) in manifest.stored(manifest.leaves()).items():
        digests = manifest.digests.get(name)
        if digests is not None and block_digests.fit(digests, shape):
            yield name, Content(members_of(manifest.plan, name), shape, dtype, digests)


def databases_of(manifest: Manifest) -> Iterator[tuple[str, dict[str, Content]]]:
    """Yields each database of a step: its name, and stored name -> content.

    Leaves out the databases that have an array without digests that fit.
    """
    contents = dict(contents_of(manifest))
    for name, database in manifest.unchanged.items():
        if contents.keys() >= set(database.arrays):
            yield name, {stored: contents[stored] for stored in database.arrays}


def leaves_in(manifest: Manifest) -> frozenset[str]:
    """Returns the leaves in the databases of unchanged arrays of a step."""
    stored = (name for database in manifest.unchanged.values() for name in database.arrays)
    plan = manifest.plan
    return frozenset(leaf for name in stored for leaf in members_of(plan, name))


def contents_of_arrays(
    plan: Plan,
    arrays: Mapping[str, AnyArray],
    digests: Mapping[str, Digests],
    names: Collection[str],
) -> dict[str, Content]:
    """Returns stored name -> content, for the arrays of a save that have one of ``names``."""
    return {
        name: Content(members_of(plan, name), tuple(array.shape), array.dtype.name, digests[name])
        for name, array in arrays.items()
        if name in names
    }


def members_of(plan: Plan, name: str) -> tuple[str, ...]:
    """Returns the leaves in a stored array, in order."""
    return plan.stacks.get(name) or (name,)


def distinct(stored: Iterable[KnownDatabase]) -> list[KnownDatabase]:
    """Returns each of the databases once."""
    return list({(s.step, s.name): s for s in stored}.values())


def packed(arrays: Mapping[str, AnyArray]) -> Iterator[tuple[str, ...]]:
    """Divides arrays into groups for one database each; yields the names in each group.

    A group has either device arrays or host arrays, which Orbax writes on different threads.

    A process holds what it writes of a database in memory until the database is complete. No
    process writes more of a group than the limit, except of a group of one array.
    """
    host = {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}
    yield from _packed({name: array for name, array in arrays.items() if name not in host})
    yield from _packed(host)


def _packed(arrays: Mapping[str, AnyArray]) -> Iterator[tuple[str, ...]]:
    part: list[str] = []
    written: collections.Counter[int] = collections.Counter()  # bytes of each process
    for name, array in arrays.items():
        writers = chunking.storing_processes(array)
        share = array.size * array.dtype.itemsize // len(writers)
        if part and max(written[index] for index in writers) + share > _DATABASE_BYTES:
            yield tuple(part)
            part, written = [], collections.Counter()
        part.append(name)
        written.update(dict.fromkeys(writers, share))
    if part:
        yield tuple(part)
