"""Finds the arrays that did not change since earlier saves, so that a save need not write them.

Which leaves do not change is known from the digests of consecutive saves. Such leaves count as
still. The storage plan keeps still leaves out of the stacks of other leaves, and a save stores them
in databases of their own (``layout/unchanged.py``). A later save that finds equal arrays takes such
a database over from an earlier step instead of writing it.

That a leaf is still decides only where it is stored. Before a save takes a database over, it
compares the 128-bit digests of the arrays that it saves with those of the stored arrays. The save
computes these digests itself, from the bytes that it would write, except for arrays on TPUs that
are the same objects as before (``identities.py``).

There are two copies of each database. Steps take them in turn, so two steps that follow each other
share no files. This run takes over only what it wrote, or what it read and compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
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
from torchax_ckpt.saving.unchanged import identities, known_databases
from torchax_ckpt.saving.unchanged.identities import Identity, Kept
from torchax_ckpt.saving.unchanged.known_databases import Content, KnownDatabase
from torchax_ckpt.snapshot.stacking import Array
from torchax_ckpt.storage.arrays.chunking import AnyArray
from torchax_ckpt.storage.arrays.placed_array import Place
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.directory.committed_step import STATE, CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.writing import databases, host_batches, retained
from torchax_ckpt.stored.stored_step import parse_manifest

logger = logging.getLogger(__name__)

# With fewer bytes of still leaves, more databases would cost more time than they save.
_MIN_STILL_BYTES = 1 << 20
# Smaller leaves may change now and then without being worth a rewrite of their database.
_MIN_LEAF_BYTES = 1 << 10
# How many steps a run searches for the other copy when it starts. Two steps that follow each other
# have different copies, except if a save wrote all arrays again.
_NUM_SEARCHED = 4


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
      alternates: whether steps take two copies of the unchanged arrays in turn; if not, all steps
        share one copy.
      searches: whether to take over what earlier programs stored, after reading it.
      steps: returns the steps of the run, oldest first.
      on_still: called with the names of the still leaves whenever they may have changed.
    """

    def __init__(
        self,
        directory: RunDirectory,
        alternates: bool,
        searches: bool,
        steps: Callable[[], Sequence[CommittedStep]],
        on_still: Callable[[frozenset[str]], None],
    ) -> None:
        self._directory = directory
        self._alternates = alternates
        self._searches = searches
        self._steps = steps
        self._on_still = on_still
        self._still: frozenset[str] = frozenset()
        self._last: Mapping[str, Content] = {}
        # For each of the two copies: stored name -> database that holds the array.
        self._copies: tuple[dict[str, KnownDatabase], dict[str, KnownDatabase]] = ({}, {})
        self._turn = 0
        self._copy_in: dict[Key, int] = {}  # key of a step -> which copy the step has
        self._identities: dict[str, Identity] = {}
        self._may_search = searches
        self._verified: Key | None = None  # the step that was restored and compared

    def expect(self, leaves: Callable[[], frozenset[str]]) -> None:
        """Gives the leaves that will probably not change, unless the run knows already.

        A run knows once a step is durable or restored. If the guess is right, the first two saves
        write the leaves as later saves need them; if it is wrong, these saves take longer.
        """
        if not self._last:
            self._be_still(leaves())

    def adopt(self, committed: CommittedStep, *, is_verified: bool) -> None:
        """Makes the next save look for what it can take over: the run continues from a step.

        Args:
          committed: the step.
          is_verified: whether the run has read all of the step and compared it with its digests.
        """
        if not self._searches:
            return
        manifest = parse_manifest(committed)
        self._last = dict(known_databases.contents_of(manifest))
        self._copies = ({}, {})
        self._identities = {}
        self._verified = committed.key if is_verified else None
        self._may_search = True
        self._be_still(_leaves_in(manifest))

    def kept(self, names: Sequence[str], arrays: Sequence[Array]) -> Kept:
        """Returns the arrays that the next save takes over without looking at their values.

        The training thread calls this method while no save is in flight.

        Args:
          names, arrays: the leaves of the state.
        """
        self._take_turn()
        still = self._still
        leaves = {n: a for n, a in zip(names, arrays, strict=True) if n in still}
        found: dict[str, Content] = {}
        for stored in known_databases.distinct(self._copies[self._turn].values()):
            if stored.is_verified and all(
                (identity := self._identities.get(name)) is not None
                and identity.content == content
                and identity.is_of(leaves)
                for name, content in stored.contents.items()
            ):
                found |= stored.contents
        same = {leaf: leaves.pop(leaf) for content in found.values() for leaf in content.members}
        return Kept(
            {name: self._identities[name].announced for name in found},
            found,
            same,
            identities.references(leaves),
        )

    def divide(self, plan: Plan, arrays: Mapping[str, AnyArray], kept: Kept) -> Division:
        """Returns which arrays a save stores in databases of unchanged arrays.

        Fetches the arrays of the databases that the save could take over, and computes their
        digests.

        Args:
          plan: the storage plan.
          arrays: stored name -> array; arrays of numpy are never taken over.
          kept: what the method ``kept`` returned for the save.
        """
        if self._may_search:
            self._may_search = False
            self._search()
        self._take_turn()
        still = {
            name: array
            for name, array in arrays.items()
            if not isinstance(array, np.ndarray)
            and self._still.issuperset(known_databases.members_of(plan, name))
        }
        paths: dict[Key | None, epath.Path] = {s.key: s.path for s in self._steps()}
        paths[None] = retained.path_of(self._directory.path)
        copy = self._copies[self._turn]
        parts: dict[str, Database] = {}
        places: dict[str, Place] = {}
        linked: dict[str, Digests] = {}

        for stored in known_databases.distinct(copy[name] for name in still if name in copy):
            if (path := paths.get(stored.step)) is None:
                continue
            source = path / STATE / unchanged.folder_of(stored.name)
            is_equal = all(
                kept.contents[name] == content
                if name in kept.contents
                else known_databases.is_equal(content, plan, name, still.get(name))
                for name, content in stored.contents.items()
            )
            gc.collect(0)  # JAX frees memory that numpy has viewed only then
            if is_equal and (stored.is_verified or known_databases.is_sound(stored, source)):
                name = unchanged.name_of(len(parts))
                parts[name] = Database(self._turn, tuple(stored.contents))
                places |= dict.fromkeys(stored.contents, databases.Linked(name, source))
                linked |= {n: content.digests for n, content in stored.contents.items()}
        for part in known_databases.packed({n: a for n, a in still.items() if n not in linked}):
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
        kept: Kept,
    ) -> None:
        """Records that a save is durable.

        Args:
          committed: the step.
          division: what ``divide`` returned for the save.
          plan: the storage plan of the save.
          arrays: stored name -> array.
          digests: stored name -> digests, of all arrays.
          kept: what the method ``kept`` returned for the save.
        """
        on_device = {n: a for n, a in arrays.items() if not isinstance(a, np.ndarray)}
        contents = {
            name: Content(
                known_databases.members_of(plan, name),
                tuple(array.shape),
                array.dtype.name,
                digests[name],
            )
            for name, array in on_device.items()
        }
        copy = self._copies[self._turn]
        copy.clear()
        for name, database in division.databases.items():
            held = {stored: contents[stored] for stored in database.arrays}
            copy |= dict.fromkeys(held, KnownDatabase(committed.key, name, held, is_verified=True))
        if division.databases:
            self._copy_in[committed.key] = self._turn
        present = {s.key for s in self._steps()} | {committed.key}
        self._copy_in = {key: n for key, n in self._copy_in.items() if key in present}
        same = {n: self._identities[n] for n in kept.arrays if n in division.linked}
        self._identities = same | {
            name: Identity(
                contents[name],
                tuple(kept.references[leaf] for leaf in contents[name].members),
                host_batches.to_announce(on_device[name]),
            )
            for name in division.places
            if all(leaf in kept.references for leaf in contents[name].members)
        }
        found = [leaf for name, now in contents.items() for leaf in self._still_in(name, now)]
        self._last = contents
        sizes = {
            leaf: array.size * array.dtype.itemsize // len(members)
            for name, array in arrays.items()
            for members in (known_databases.members_of(plan, name),)
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
        self._take_turn()  # of the next save
        directory = self._directory
        copy = self._copies[self._turn]
        stored = known_databases.distinct(copy.values())
        if needed := {s.step for s in stored if s.step is not None and s.step in steps}:
            newest = max(needed)  # the folder takes databases of one step only
            held = [s for s in stored if s.step == newest]
            try:
                names = [s.name for s in held]
                retained.keep(directory.path, steps[newest], names, directory.fence)
            except OSError as error:  # the next save writes these arrays
                logger.info("%s: no unchanged arrays are kept aside: %s", newest, error)
                return
            for database in held:
                kept = dataclasses.replace(database, step=None)
                copy |= dict.fromkeys(kept.contents, kept)
        elif all(stored.step is not None for part in self._copies for stored in part.values()):
            retained.remove(directory.path, directory.fence)

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

    def _take_turn(self) -> None:
        """Sets the copy for the next save, given the one that the newest step has."""
        if (steps := self._steps()) and (copy := self._copy_in.get(steps[-1].key)) is not None:
            self._turn = 1 - copy if self._alternates else copy

    def _search(self) -> None:
        """Looks for databases in the newest steps of the run, and in the folder beside them."""
        found: frozenset[str] = frozenset()
        for committed in reversed(self._steps()[-_NUM_SEARCHED:]):
            try:
                manifest = parse_manifest(committed)
            except CheckpointError as error:
                logger.info("nothing is taken over from step %d: %s", committed.step, error)
                continue
            self._know(committed.key, manifest)
            found = found or _leaves_in(manifest)
        with contextlib.suppress(OSError, ValueError, RecursionError, CheckpointError):
            self._know(None, retained.read_manifest(self._directory.path))
        if not self._still:
            self._be_still(found)

    def _know(self, key: Key | None, manifest: Manifest) -> None:
        is_verified = key is not None and key == self._verified
        contents = dict(known_databases.contents_of(manifest))
        for name, database in manifest.unchanged.items():
            if not contents.keys() >= set(database.arrays):
                continue  # damaged
            held = {stored: contents[stored] for stored in database.arrays}
            copy = self._copies[database.copy]
            # A step has each array once, so it could not take over two databases with one array.
            if copy.keys().isdisjoint(held):
                copy |= dict.fromkeys(held, KnownDatabase(key, name, held, is_verified))
            if key is not None:
                self._copy_in[key] = database.copy


def _leaves_in(manifest: Manifest) -> frozenset[str]:
    """Returns the leaves in the databases of unchanged arrays of a step."""
    stored = (name for database in manifest.unchanged.values() for name in database.arrays)
    plan = manifest.plan
    return frozenset(leaf for name in stored for leaf in known_databases.members_of(plan, name))
