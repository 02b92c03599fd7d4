"""Leaves that a save takes over without looking at their values, because they are the same arrays.

The buffer of a JAX array on a TPU never changes, so an array that is the same object as at an
earlier save has the same values. Its values are then neither copied nor fetched nor compared. On
the CPU and on GPUs an array may share memory with an array of another library, so there the
identity of the array proves nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.saving.unchanged.known_databases import Content
from torchax_ckpt.snapshot.host_array import HostArray
from torchax_ckpt.snapshot.snapshotter import require_alive
from torchax_ckpt.snapshot.stacking import Array, execute
from torchax_ckpt.storage.writing import host_batches


@dataclasses.dataclass(frozen=True)
class Identity:
    """The leaves whose values are stored in an array.

    Attributes:
      content: what the stored array holds.
      references: references to the leaves in the stored array, in order.
      announced: its shape, dtype and sharding.
    """

    content: Content
    references: tuple[weakref.ref[jax.Array], ...]
    announced: HostArray

    def is_of(self, leaves: Mapping[str, Array]) -> bool:
        """Returns whether the leaves are still the same objects."""
        return all(
            (leaf := leaves.get(name)) is not None and reference() is leaf
            for name, reference in zip(self.content.members, self.references, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class Kept:
    """The arrays of a save that are taken over because their leaves are the same objects.

    Attributes:
      arrays: stored name -> the array's shape, dtype and sharding.
      contents: stored name -> what the array holds.
      leaves: name -> leaf, for all leaves in the arrays. They are held until the save ends, because
        the step that has their values may be deleted before the save begins to write.
      references: references to the other leaves that did not change at earlier saves, and whose
        identity proves their values.
      identities: stored name -> the identity by which the array is taken over.
    """

    arrays: Mapping[str, HostArray] = dataclasses.field(default_factory=dict)
    contents: Mapping[str, Content] = dataclasses.field(default_factory=dict)
    leaves: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    references: Mapping[str, weakref.ref[jax.Array]] = dataclasses.field(default_factory=dict)
    identities: Mapping[str, Identity] = dataclasses.field(default_factory=dict)

    @property
    def stacks(self) -> dict[str, tuple[str, ...]]:
        """The stacks among the arrays: stored name -> members."""
        return {n: c.members for n, c in self.contents.items() if c.members != (n,)}

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


def learned(
    kept: Kept,
    linked: Collection[str],
    apart: Iterable[str],
    contents: Mapping[str, Content],
    arrays: Mapping[str, Any],
) -> dict[str, Identity]:
    """Returns what a save has learned of arrays whose leaves prove their values.

    Args:
      kept: what ``Reuse.kept`` returned for the save.
      linked: the stored names of the arrays that the save took over.
      apart: the stored names of all arrays in databases of unchanged arrays.
      contents: stored name -> content, for all arrays in these databases.
      arrays: stored name -> array.
    """
    new = {
        name: Identity(
            contents[name],
            tuple(kept.references[leaf] for leaf in contents[name].members),
            host_batches.to_announce(arrays[name]),
        )
        for name in apart
        if all(leaf in kept.references for leaf in contents[name].members)
    }
    return {n: kept.identities[n] for n in kept.arrays if n in linked} | new


def references(leaves: Mapping[str, Array]) -> dict[str, weakref.ref[jax.Array]]:
    """Returns references to the leaves whose identity proves their values."""
    return {
        name: weakref.ref(array)
        for name, array in leaves.items()
        if isinstance(array, jax.Array) and is_proof(array)
    }


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
