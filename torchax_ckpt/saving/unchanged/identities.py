"""Leaves that a save takes over without looking at their values, because they are the same arrays.

The buffer of a JAX array on a TPU never changes, so the same object has the same values as at an
earlier save, whose digests of them, or those of a restore, the save uses. An array is looked at
again if another array of its database is another object, or if the two copies of the database
differ. Each process knows the identities of its own objects only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from torchax_ckpt.devices.host_array import HostArray
from torchax_ckpt.devices.sharding import stacked, to_host_part
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.saving.unchanged import ledger
from torchax_ckpt.saving.unchanged.ledger import Content, Entry, Reference
from torchax_ckpt.snapshot.snapshotter import require_alive
from torchax_ckpt.snapshot.stacking import Array, execute


@dataclasses.dataclass(frozen=True)
class Skipped:
    """The arrays that a save need not look at to take them over: their leaves are the same objects.

    The leaves are held until the save ends, because the step that has their values may be deleted
    before the save begins to write.
    """

    # Stored name -> array without values, over the devices of all processes; and what it holds.
    forms: Mapping[str, HostArray] = dataclasses.field(default_factory=dict)
    contents: Mapping[str, Content] = dataclasses.field(default_factory=dict)
    leaves: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    # To all still leaves whose identity proves their values.
    references: Mapping[str, Reference] = dataclasses.field(default_factory=dict)

    @property
    def stacks(self) -> dict[str, tuple[str, ...]]:
        """The stacks among the arrays: stored name -> members."""
        members = {name: content.members for name, content in self.contents.items()}
        return {name: leaves for name, leaves in members.items() if leaves != (name,)}

    @property
    def long_digests(self) -> dict[str, bytes]:
        """Stored name -> the long digests of the array."""
        return {name: content.digests.long or b"" for name, content in self.contents.items()}

    def restricted_to(self, leaves: frozenset[str]) -> Skipped:
        """Returns what is skipped if no other leaves may be."""
        contents = {n: c for n, c in self.contents.items() if leaves.issuperset(c.members)}
        forms = {name: self.forms[name] for name in contents}
        held = {leaf: self.leaves[leaf] for c in contents.values() for leaf in c.members}
        return Skipped(forms, contents, held, self.references)

    def require_alive(self) -> None:
        """Raises DonatedBufferError if a leaf was donated or deleted."""
        require_alive(self.leaves.items())

    def others(
        self, names: Sequence[str], arrays: Sequence[Array]
    ) -> tuple[Sequence[str], Sequence[Array]]:
        """Returns the leaves of a state, names and arrays, that are not skipped."""
        if not self.leaves:
            return names, arrays
        others = {n: a for n, a in zip(names, arrays, strict=True) if n not in self.leaves}
        return list(others), list(others.values())

    def stored(self, names: Iterable[str]) -> dict[str, Array]:
        """Returns some of the arrays with their values; stacks are made on the devices."""
        contents = [(name, self.contents[name].members) for name in names]
        stacks = {name: members for name, members in contents if members != (name,)}
        leaves = {leaf: self.leaves[leaf] for _, members in contents for leaf in members}
        return execute(Plan(stacks, frozenset()), leaves, copy=False)


def common(found: Sequence[Skipped]) -> list[Skipped]:
    """Returns what saves of one state to several tiers skip: in each tier the same leaves."""
    result = [*found]
    while len({frozenset(skipped.leaves) for skipped in result}) > 1:
        leaves = frozenset.intersection(*(frozenset(skipped.leaves) for skipped in result))
        result = [skipped.restricted_to(leaves) for skipped in result]
    return result


def in_both_copies(newest: Entry, other: Entry, *, is_per_host: bool) -> list[dict[str, HostArray]]:
    """Returns the databases that both have, as forms, if identity proves their values."""
    found = []
    for database in newest.databases.values():
        forms: dict[str, HostArray] = {}
        for name in database.arrays:
            if (form := _form(name, newest)) is None or name not in other.contents:
                break
            content = newest.contents[name]
            here = to_host_part(form) if is_per_host else form
            long = content.digests.long or b""
            if content.shape != tuple(here.shape) or not ledger.is_same(
                other.contents[name], content.members, here, long
            ):
                break
            forms[name] = form
        else:
            found.append(forms)
    return found


def _form(name: str, entry: Entry) -> HostArray | None:
    """Returns the form of a stored array whose leaves are alive, and are as it holds them."""
    if (content := entry.contents.get(name)) is None:
        return None
    leaves = [r() for leaf in content.members if (r := entry.references.get(leaf)) is not None]
    first = leaves[0] if leaves else None
    if first is None or len(leaves) != len(content.members):
        return None
    forms = {None if a is None else (a.shape, a.dtype.name, a.sharding) for a in leaves}
    if forms != {(first.shape, content.dtype, first.sharding)}:
        return None
    if content.members == (name,):
        return HostArray(first.shape, np.dtype(first.dtype), first.sharding, {})
    sharding = stacked(first.sharding)
    shape = (len(leaves), *first.shape)
    return None if sharding is None else HostArray(shape, np.dtype(first.dtype), sharding, {})


def is_proof(array: jax.Array) -> bool:
    """Returns whether the identity of an array proves that its values did not change."""
    # On a GPU or a host, DLPack lets an array share memory with a library that changes it.
    return _is_on_tpu(array.sharding)


@functools.lru_cache(maxsize=256)
def _is_on_tpu(sharding: Sharding) -> bool:
    devices: Iterable[Any] = sharding.device_set
    in_device_memory = sharding.memory_kind in (None, "device")
    return in_device_memory and all(device.platform == "tpu" for device in devices)
