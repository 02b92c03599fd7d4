"""Leaves that a save takes over without looking at their values, because they are the same arrays.

The buffer of a JAX array on a TPU never changes, so an array that is the same object as at an
earlier save has the same values. Its values are then neither copied nor fetched; the save uses the
digests that an earlier save has taken of them, or those with which a restore has compared them. On
the CPU and on GPUs an array may share memory with an array of another library, so there the
identity of the array proves nothing.

An array is looked at again if another array of its database is another object, or if the two copies
of the database differ.

In a run of several processes, each process knows the identities of its own objects, and the digests
of the blocks that it has. If only some processes find the arrays of a database to be the same
objects, the others fetch these arrays and take their digests.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.layout.unchanged import Database
from torchax_ckpt.saving.unchanged import known_databases
from torchax_ckpt.saving.unchanged.comparison import Taken
from torchax_ckpt.snapshot.host_array import HostArray
from torchax_ckpt.snapshot.snapshotter import require_alive
from torchax_ckpt.snapshot.stacking import Array, execute
from torchax_ckpt.storage.directory.abandonment import Key


class Values(NamedTuple):
    """What a stored array holds: its leaves, in order, and the digests of its values."""

    members: tuple[str, ...]
    taken: Taken


@dataclasses.dataclass(frozen=True)
class Identity:
    """The leaves in a stored array, and what is known of their values.

    Attributes:
      references: the names of the leaves, in order -> references to them.
      announced: the shape, dtype and sharding of the array, over the devices of all processes.
      taken: the digests of its values, as this tier stores them.
    """

    references: Mapping[str, weakref.ref[jax.Array]]
    announced: HostArray
    taken: Taken

    @property
    def values(self) -> Values:
        """What the array holds."""
        return Values((*self.references,), self.taken)

    def is_of(self, leaves: Mapping[str, Array]) -> bool:
        """Returns whether the leaves are still the same objects."""
        names, references = self.references.keys(), self.references.values()
        return names <= leaves.keys() and all(
            map(operator.is_, map(operator.call, references), map(leaves.get, names))
        )


_Identities = Mapping[str, Identity]
"""Stored name -> identity, for the arrays of a database."""
_Contents = Mapping[str, Values]
"""Stored name -> values, for the arrays of a database."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """The arrays that a save need not look at to take them over: their leaves are the same objects.

    Attributes:
      identities: stored name -> the identity of the array.
      leaves: name -> leaf, for all leaves in the arrays. They are held until the save ends, because
        the step that has their values may be deleted before the save begins to write.
      references: references to the leaves that did not change at earlier saves, and whose identity
        proves their values.
    """

    identities: Mapping[str, Identity] = dataclasses.field(default_factory=dict)
    leaves: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    references: Mapping[str, weakref.ref[jax.Array]] = dataclasses.field(default_factory=dict)

    @property
    def arrays(self) -> dict[str, HostArray]:
        """Stored name -> the array's shape, dtype and sharding."""
        return {name: identity.announced for name, identity in self.identities.items()}

    @property
    def stacks(self) -> dict[str, tuple[str, ...]]:
        """The stacks among the arrays: stored name -> members."""
        members = {name: tuple(i.references) for name, i in self.identities.items()}
        return {name: leaves for name, leaves in members.items() if leaves != (name,)}

    @property
    def taken(self) -> dict[str, Taken]:
        """Stored name -> the digests of the array's values."""
        return {name: identity.taken for name, identity in self.identities.items()}

    def among(self, leaves: Collection[str]) -> Kept:
        """Returns what is kept if no other leaves than the given ones may be."""
        found = {n: i for n, i in self.identities.items() if i.references.keys() <= {*leaves}}
        names = {leaf for identity in found.values() for leaf in identity.references}
        return Kept(found, {n: a for n, a in self.leaves.items() if n in names}, self.references)

    def require_alive(self) -> None:
        """Raises DonatedBufferError if a leaf was donated or deleted."""
        require_alive(self.leaves.items())

    def others(
        self, names: Sequence[str], arrays: Sequence[Array]
    ) -> tuple[Sequence[str], Sequence[Array]]:
        """Returns the leaves of a state, names and arrays, that are not taken over."""
        if not self.leaves:
            return names, arrays
        others = {n: a for n, a in zip(names, arrays, strict=True) if n not in self.leaves}
        return list(others), list(others.values())

    def stored(self, names: Iterable[str]) -> dict[str, Array]:
        """Returns some of the arrays with their values; stacks are made on the devices."""
        wanted = set(names)
        stacks = {name: members for name, members in self.stacks.items() if name in wanted}
        members = {leaf for group in stacks.values() for leaf in group} | wanted
        leaves = {name: leaf for name, leaf in self.leaves.items() if name in members}
        return execute(Plan(stacks, frozenset()), leaves, copy=False)


def together(found: Sequence[Kept]) -> list[Kept]:
    """Returns what saves of one state to several tiers keep: in each tier the same leaves."""
    result = [*found]
    while len({frozenset(kept.leaves) for kept in result}) > 1:
        common = frozenset.intersection(*(frozenset(kept.leaves) for kept in result))
        result = [kept.among(common) for kept in result]
    return result


class Identities:
    """Knows which arrays of the next save are the same objects as at earlier saves, or as restored.

    Args:
      alternates: whether steps have two copies of the unchanged arrays in turn.
      is_alone: whether this is a run of one process. In a run of several, process 0 stores the
        arrays on devices of one process as host arrays.
    """

    def __init__(self, alternates: bool, is_alone: bool) -> None:
        self._alternates = alternates
        self._is_alone = is_alone
        # Still leaves none of which is on a TPU, so that later saves need not ask each of them.
        self._without_proof: frozenset[str] | None = None
        self.forget()

    def forget(self) -> None:
        """Forgets everything: the next save looks at all values."""
        self._newest: Key | None = None  # the newest step
        # The databases of the newest step that are equal in both copies.
        self._equal: list[_Identities] = []
        # The databases of each copy, as the newest step that has the copy stored them.
        self._copies: list[list[_Contents]] = [[], []]
        # The copy and the databases of a save that is not durable yet.
        self._next: tuple[int, list[_Identities]] | None = None

    def kept(
        self,
        newest: Key | None,
        names: Iterable[str],
        arrays: Iterable[Array],
        still: frozenset[str],
    ) -> Kept:
        """Returns the arrays that the next save need not look at.

        Args:
          newest: the newest step of the run.
          names, arrays: the leaves of the state.
          still: the leaves that did not change at earlier saves.
        """
        if still is self._without_proof:
            return Kept()
        leaves = dict(zip(names, arrays, strict=True))
        found: dict[str, Identity] = {}
        if newest is not None and newest == self._newest:
            for database in self._equal:
                if all(identity.is_of(leaves) for identity in database.values()):
                    found |= database
        references: dict[str, weakref.ref[jax.Array]] = {}
        for identity in found.values():
            references.update(identity.references)
        same = dict(zip(references, map(leaves.__getitem__, references), strict=True))
        others = (still - references.keys()) & leaves.keys()
        references |= self.proven({leaf: leaves[leaf] for leaf in others})
        if not references:
            self._without_proof = still
        return Kept(found, same, references)

    def proven(self, leaves: Mapping[str, Any]) -> dict[str, weakref.ref[jax.Array]]:
        """Returns references to those of the leaves whose identity proves their values."""
        return {
            name: weakref.ref(array)
            for name, array in leaves.items()
            if isinstance(array, jax.Array)
            and is_proof(array)
            and (self._is_alone or not array.is_fully_addressable)
        }

    def restored(
        self,
        key: Key,
        copy: int,
        databases: Sequence[_Identities],
        equal: Sequence[_Identities],
    ) -> None:
        """Learns which objects a restore has made of the unchanged arrays of a step.

        Args:
          key: the step.
          copy: which copy it has.
          databases: its databases.
          equal: those of them that are equal in the other copy.
        """
        self._without_proof = None
        self._copies[1 - copy] = [_contents_of(database) for database in equal]
        self._settle(key, copy, databases)

    def saving(
        self,
        databases: Mapping[str, Database],
        plan: Plan,
        arrays: Mapping[str, HostArray],
        taken: Mapping[str, Taken],
        references: Mapping[str, weakref.ref[jax.Array]],
    ) -> None:
        """Learns what a save stores in its databases, which counts once the step is durable.

        Args:
          databases: name -> database of unchanged arrays.
          plan: the storage plan.
          arrays: stored name -> array, over the devices of all processes; values do not count.
          taken: stored name -> digests of the array's values.
          references: as in ``Kept``.
        """
        copy = 0
        found: list[_Identities] = []
        for database in databases.values():
            copy = database.copy
            members = {name: known_databases.members_of(plan, name) for name in database.arrays}
            leaves = {leaf for group in members.values() for leaf in group}
            if members.keys() <= taken.keys() & arrays.keys() and leaves <= references.keys():
                found.append(
                    {
                        name: Identity(
                            {leaf: references[leaf] for leaf in group}, arrays[name], taken[name]
                        )
                        for name, group in members.items()
                    }
                )
        self._next = (copy, found) if found else None

    def landed(self, key: Key) -> None:
        """Records that the step of the save is durable on all processes."""
        if self._next is None:
            self.forget()
        else:
            self._settle(key, *self._next)

    def _settle(self, key: Key, copy: int, databases: Sequence[_Identities]) -> None:
        contents = [_contents_of(database) for database in databases]
        self._copies[copy] = contents
        other = self._copies[1 - copy if self._alternates else copy]
        self._equal = [d for d, now in zip(databases, contents, strict=True) if now in other]
        self._newest, self._next = key, None


def _contents_of(database: _Identities) -> _Contents:
    return {name: identity.values for name, identity in database.items()}


def is_proof(array: jax.Array) -> bool:
    """Returns whether the identity of an array proves that its values did not change.

    On a GPU, DLPack lets an array share memory with another library, which may change it. Memory of
    the host may be shared as well.
    """
    return _is_on_tpu(array.sharding)


@functools.lru_cache(maxsize=256)
def _is_on_tpu(sharding: Sharding) -> bool:
    devices: Iterable[Any] = sharding.device_set
    in_device_memory = sharding.memory_kind in (None, "device")
    return in_device_memory and all(device.platform == "tpu" for device in devices)
