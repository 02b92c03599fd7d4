"""Finds the arrays that did not change since earlier saves, so that a save need not write them.

Which leaves do not change is known from the digests of consecutive saves. Such leaves count as
still. The storage plan keeps still leaves out of the stacks of other leaves, and a save stores them
in databases of their own (``layout/unchanged.py``). A later save that finds equal arrays takes such
a database over from an earlier step instead of writing it.

That a leaf is still decides only where it is stored. Before a save takes a database over, it
compares the 128-bit digests of the arrays that it saves with those of the stored arrays. The save
computes these digests itself, from the bytes that it would write, because an array on the CPU may
share memory with an array of numpy, and then changes without becoming another object.

There are two copies of each database. Steps take them in turn, so two steps that follow each other
share no files. This run takes over only what it wrote, or what it read and compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from etils import epath

from torchax_ckpt.errors import CheckpointError
from torchax_ckpt.layout import unchanged
from torchax_ckpt.layout.digests import Digests
from torchax_ckpt.layout.manifest import Manifest
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.layout.unchanged import Database
from torchax_ckpt.storage.arrays import block_digests
from torchax_ckpt.storage.arrays.chunking import AnyArray
from torchax_ckpt.storage.arrays.placed_array import Place
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.directory.committed_step import STATE, CommittedStep
from torchax_ckpt.storage.writing import databases, host_batches, retained
from torchax_ckpt.stored.stored_step import parse_manifest

logger = logging.getLogger(__name__)

# Smaller arrays share a database, because each database takes some milliseconds. If one array of a
# database changes, all of its arrays are written again.
_DATABASE_BYTES = 64 << 20
# With fewer bytes of still leaves, more databases would cost more time than they save.
_MIN_STILL_BYTES = 1 << 20
# Smaller leaves may change now and then without being worth a rewrite of their database.
_MIN_LEAF_BYTES = 1 << 10
# How many steps a run searches for the other copy when it starts. Two steps that follow each other
# have different copies, except if a save wrote all arrays again.
_NUM_SEARCHED = 4


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
class _Stored:
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


@dataclasses.dataclass(frozen=True)
class Division:
    """Which arrays of a save are stored in databases of unchanged arrays.

    Attributes:
      databases: the databases of the new step: name -> database.
      places: stored name -> where the array is stored, for the arrays in these databases.
      linked: stored name -> digests, for the arrays whose database the save takes over.
    """

    databases: Mapping[str, Database] = dataclasses.field(default_factory=dict)
    places: Mapping[str, Place] = dataclasses.field(default_factory=dict)
    linked: Mapping[str, Digests] = dataclasses.field(default_factory=dict)


class Reuse:
    """Knows the databases of unchanged arrays of a run, and divides the arrays of each save.

    The thread of a save calls all methods but ``adopt``, which the training thread calls while no
    save is in flight.

    Args:
      directory: the directory of the run.
      steps: returns the steps of the run, oldest first.
      on_still: called with the names of the still leaves whenever they may have changed.
    """

    def __init__(
        self,
        directory: epath.Path,
        steps: Callable[[], Sequence[CommittedStep]],
        on_still: Callable[[frozenset[str]], None],
    ) -> None:
        self._directory = directory
        self._steps = steps
        self._on_still = on_still
        self._still: frozenset[str] = frozenset()
        self._last: Mapping[str, Content] = {}
        # For each of the two copies: stored name -> database that holds the array.
        self._copies: tuple[dict[str, _Stored], dict[str, _Stored]] = ({}, {})
        self._turn = 0
        # The step that was restored, until the next save has looked for the other copy.
        self._restored: CommittedStep | None = None

    def expect(self, leaves: Callable[[], frozenset[str]]) -> None:
        """Gives the leaves that will probably not change, unless the run knows already.

        A run knows once a step is durable or restored. If the guess is right, the first two saves
        write the leaves as later saves need them; if it is wrong, these saves take longer.
        """
        if not self._last:
            self._be_still(leaves())

    def adopt(self, committed: CommittedStep) -> None:
        """Makes later saves take over what a step stores, which this run has read and compared."""
        manifest = parse_manifest(committed)
        self._last = dict(_contents(manifest))
        self._copies = ({}, {})
        for database in manifest.unchanged.values():
            self._turn = 1 - database.copy
        self._know(committed.key, manifest, is_verified=True)
        self._restored = committed if manifest.unchanged else None
        held = (content.members for copy in self._copies for content in _all_contents(copy))
        self._be_still(frozenset(leaf for members in held for leaf in members))

    def divide(self, plan: Plan, arrays: Mapping[str, AnyArray]) -> Division:
        """Returns which arrays a save stores in databases of unchanged arrays.

        Fetches the arrays of the databases that the save could take over, and computes their
        digests.

        Args:
          plan: the storage plan.
          arrays: stored name -> array; arrays of numpy are never taken over.
        """
        if self._restored is not None:
            self._search(self._restored)
            self._restored = None
        still = {
            name: array
            for name, array in arrays.items()
            if not isinstance(array, np.ndarray) and self._still.issuperset(_members(plan, name))
        }
        paths: dict[Key | None, epath.Path] = {s.key: s.path for s in self._steps()}
        paths[None] = retained.path_of(self._directory)
        copy = self._copies[self._turn]
        parts: dict[str, Database] = {}
        places: dict[str, Place] = {}
        linked: dict[str, Digests] = {}

        for stored in _distinct(copy[name] for name in still if name in copy):
            if (path := paths.get(stored.step)) is None:
                continue
            source = path / STATE / unchanged.folder_of(stored.name)
            is_equal = all(_is_equal(c, plan, n, still.get(n)) for n, c in stored.contents.items())
            if is_equal and (stored.is_verified or _is_sound(stored, source)):
                name = unchanged.name_of(len(parts))
                parts[name] = Database(self._turn, tuple(stored.contents))
                places |= dict.fromkeys(stored.contents, databases.Linked(name, source))
                linked |= {n: content.digests for n, content in stored.contents.items()}
        for part in _packed({n: a for n, a in still.items() if n not in linked}):
            name = unchanged.name_of(len(parts))
            parts[name] = Database(self._turn, part)
            places |= dict.fromkeys(part, databases.Fresh(name, len(part)))
        return Division(parts, places, linked)

    def landed(
        self,
        committed: CommittedStep,
        division: Division,
        plan: Plan,
        arrays: Mapping[str, AnyArray],
        digests: Mapping[str, Digests],
    ) -> None:
        """Records that a save is durable.

        Args:
          committed: the step.
          division: what ``divide`` returned for the save.
          plan: the storage plan of the save.
          arrays: stored name -> array.
          digests: stored name -> digests, of all arrays.
        """
        contents = {
            name: Content(_members(plan, name), tuple(array.shape), array.dtype.name, digests[name])
            for name, array in arrays.items()
            if not isinstance(array, np.ndarray)
        }
        copy = self._copies[self._turn]
        copy.clear()
        for name, database in division.databases.items():
            held = {stored: contents[stored] for stored in database.arrays}
            copy |= dict.fromkeys(held, _Stored(committed.key, name, held, is_verified=True))
        if division.databases:
            self._turn = 1 - self._turn
        found = [leaf for name, now in contents.items() for leaf in self._still_in(name, now)]
        self._last = contents
        sizes = {
            leaf: array.size * array.dtype.itemsize // len(members)
            for name, array in arrays.items()
            for members in (_members(plan, name),)
            for leaf in members
        }
        still = frozenset(leaf for leaf in found if sizes[leaf] >= _MIN_LEAF_BYTES)
        is_worthwhile = sum(sizes[leaf] for leaf in still) >= _MIN_STILL_BYTES
        self._be_still(still if is_worthwhile else frozenset())

    def failed(self) -> None:
        """Records that a save failed: the next save takes nothing over that this save tried to.

        The reason may be that a database of an earlier step is damaged.
        """
        self._copies[self._turn].clear()

    def retain(self, doomed: Iterable[CommittedStep]) -> None:
        """Keeps the databases that the next save takes over, if they are in steps to be deleted."""
        steps = {committed.key: committed for committed in doomed}
        copy = self._copies[self._turn]
        needed = [s for s in _distinct(copy.values()) if s.step in steps]
        if needed and needed[0].step is not None:
            # One save wrote or took over all databases of a copy, so they are in one step.
            retained.keep(self._directory, steps[needed[0].step], [s.name for s in needed])
            for stored in needed:
                kept = dataclasses.replace(stored, step=None)
                copy |= dict.fromkeys(kept.contents, kept)
        elif all(stored.step is not None for part in self._copies for stored in part.values()):
            retained.remove(self._directory)

    def _be_still(self, leaves: frozenset[str]) -> None:
        if leaves != self._still:
            logger.info("%d leaves do not change and are stored apart from the others", len(leaves))
            self._still = leaves
            self._on_still(leaves)

    def _still_in(self, name: str, now: Content) -> Iterator[str]:
        """Yields the leaves of an array that did not change since the last save.

        If the last save stored the leaves in another array, a leaf is still if it was.
        """
        last = self._last.get(name)
        if (
            last is None
            or last.members != now.members
            or last.shape != now.shape
            or last.digests.block != now.digests.block
        ):
            yield from self._still.intersection(now.members)
            return
        before, after = (
            np.frombuffer(c.digests.values, "<u8").reshape(len(now.members), -1)
            for c in (last, now)
        )
        is_equal = (before == after).all(axis=1)
        yield from (leaf for leaf, equal in zip(now.members, is_equal, strict=True) if equal)

    def _know(self, key: Key | None, manifest: Manifest, *, is_verified: bool) -> None:
        contents = dict(_contents(manifest))
        for name, database in manifest.unchanged.items():
            held = {stored: contents[stored] for stored in database.arrays}
            stored = _Stored(key, name, held, is_verified)
            for array in held:
                self._copies[database.copy].setdefault(array, stored)

    def _search(self, restored: CommittedStep) -> None:
        """Looks for the copy that a restored step does not have, in the steps before it."""
        earlier = [s for s in self._steps() if s.step < restored.step]
        for committed in reversed(earlier[-_NUM_SEARCHED:]):
            try:
                manifest = parse_manifest(committed)
            except CheckpointError as error:
                logger.info("nothing is taken over from step %d: %s", committed.step, error)
                continue
            self._know_other(committed.key, manifest)
        with contextlib.suppress(OSError, ValueError, CheckpointError):
            self._know_other(None, retained.read_manifest(self._directory))

    def _know_other(self, key: Key | None, manifest: Manifest) -> None:
        others = {n: d for n, d in manifest.unchanged.items() if d.copy == self._turn}
        self._know(key, dataclasses.replace(manifest, unchanged=others), is_verified=False)


def _is_sound(stored: _Stored, folder: epath.Path) -> bool:
    """Reads a database that this run does not know; returns whether it may be taken over."""
    for name, content in stored.contents.items():
        if not databases.holds(folder, name, content.shape, content.dtype, content.digests):
            logger.warning("%s is damaged: the unchanged arrays are written again", folder)
            return False
    return True


def _contents(manifest: Manifest) -> Iterator[tuple[str, Content]]:
    for name, (shape, dtype) in manifest.stored(manifest.leaves()).items():
        if (digests := manifest.digests.get(name)) is not None:
            yield name, Content(_members(manifest.plan, name), shape, dtype, digests)


def _all_contents(copy: Mapping[str, _Stored]) -> Iterator[Content]:
    for stored in copy.values():
        yield from stored.contents.values()


def _members(plan: Plan, name: str) -> tuple[str, ...]:
    return plan.stacks.get(name) or (name,)


def _distinct(stored: Iterable[_Stored]) -> list[_Stored]:
    return list({(s.step, s.name): s for s in stored}.values())


def _is_equal(content: Content, plan: Plan, name: str, array: AnyArray | None) -> bool:
    """Fetches an array; returns whether it is what a database holds under the same name."""
    if (
        array is None
        or isinstance(array, np.ndarray)
        or content.members != _members(plan, name)
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


def _packed(arrays: Mapping[str, AnyArray]) -> Iterator[tuple[str, ...]]:
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
