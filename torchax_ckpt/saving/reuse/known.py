"""What a tier knows of frozen arrays: which committed steps have them, by digest and by identity.

The buffer of a JAX array on a TPU never changes, so the same object has the values that an earlier
save has digested. A save does not look at an array if all of its leaves are such objects, and both
copies have it.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Sharding

from torchax_ckpt.devices.host_array import HostArray
from torchax_ckpt.devices.sharding import to_host_part
from torchax_ckpt.layout.array_digests import Digests
from torchax_ckpt.layout.manifest import Manifest
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.layout.unchanged import Database
from torchax_ckpt.snapshot.stacking import Array, execute, stacked_sharding
from torchax_ckpt.storage.arrays import block_digests, chunking
from torchax_ckpt.storage.arrays.chunking import AnyArray
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.medium.stored_file import StoredFile
from torchax_ckpt.storage.writing import array_writer

Reference: TypeAlias = "weakref.ref[jax.Array]"


@dataclasses.dataclass(frozen=True)
class Content:
    """What a stored array holds: its leaves, in order, and the digests of its blocks."""

    members: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    digests: Digests  # 0 for blocks that only other processes know


@dataclasses.dataclass(frozen=True)
class Entry:
    """The databases of frozen arrays of one committed step."""

    key: Key  # the step's number and commit time
    copy: int  # which of the two copies of the frozen arrays the step has
    databases: Mapping[str, Database]  # in the same order on all processes
    contents: Mapping[str, Content]  # stored name -> content, of arrays that this process knows
    files: Mapping[str, StoredFile]  # on process 0
    since: int = 0  # the oldest step that may have one of the files
    is_retained: bool = False  # whether the folder ``unchanged`` has the files too


@dataclasses.dataclass(frozen=True)
class Proof:
    """A stored array whose values are known as long as its leaves are these objects."""

    content: Content
    leaves: Mapping[str, Reference]
    form: HostArray  # without values, over the devices of all processes


@dataclasses.dataclass(frozen=True)
class Known:
    """What one process knows; replaced as a whole.

    ``entries`` has, for each copy, the newest step that has it. ``proofs`` are of arrays that all
    copies have, by stored name. ``origin`` is the step that the run continues from, until a save.
    ``num_refused`` counts the newest saves that failed while a bucket copied files for them, and
    ``num_in_full`` the saves from now on that therefore reuse nothing.
    """

    entries: Mapping[int, Entry] = dataclasses.field(default_factory=dict)
    proofs: Mapping[str, Proof] = dataclasses.field(default_factory=dict)
    origin: Key | None = None
    has_reused: bool = False  # whether a save of this program reused files
    num_refused: int = 0
    num_in_full: int = 0


@dataclasses.dataclass(frozen=True)
class SameObjects:
    """The arrays that a save leaves out of its snapshot, because it knows their values."""

    proofs: Mapping[str, Proof] = dataclasses.field(default_factory=dict)
    # Held until the save ends, because it must write them if the files of the step before are gone.
    leaves: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    # To all frozen leaves whose identity proves their values.
    references: Mapping[str, Reference] = dataclasses.field(default_factory=dict)

    @property
    def stacks(self) -> dict[str, tuple[str, ...]]:
        """The stacks among the arrays: stored name -> members."""
        members = {name: proof.content.members for name, proof in self.proofs.items()}
        return {name: leaves for name, leaves in members.items() if leaves != (name,)}

    def others(
        self, names: Sequence[str], arrays: Sequence[Array]
    ) -> tuple[Sequence[str], Sequence[Array]]:
        """Returns the other leaves of a state: names and arrays."""
        if not self.leaves:
            return names, arrays
        others = {n: a for n, a in zip(names, arrays, strict=True) if n not in self.leaves}
        return list(others), list(others.values())

    def stored(self, names: Iterable[str]) -> dict[str, Array]:
        """Returns some of the arrays with their values; stacks are made on the devices."""
        leaves = {leaf: self.leaves[leaf] for n in names for leaf in self.proofs[n].leaves}
        stacks = {name: members for name, members in self.stacks.items() if members[0] in leaves}
        return execute(Plan(stacks, frozenset()), leaves, copy=False)


def members_of(plan: Plan, name: str) -> tuple[str, ...]:
    """Returns the leaves in a stored array, in order."""
    return plan.stacks.get(name) or (name,)


def contents_of_step(manifest: Manifest, leaves: Collection[str]) -> dict[str, Content]:
    """Returns stored name -> content, for the arrays of a step that have these leaves only."""
    return {
        name: Content(members_of(manifest.plan, name), shape, dtype, manifest.digests[name])
        for name, (shape, dtype) in manifest.stored(manifest.leaves).items()
        if name in manifest.digests
        and all(leaf in leaves for leaf in members_of(manifest.plan, name))
    }


def compare(
    entry: Entry,
    plan: Plan,
    arrays: Collection[str],
    here: Mapping[str, AnyArray],
    proofs: Mapping[str, Proof],
) -> bytes:
    """Returns one byte for each database of an entry: 1 if all that is stored here of it is equal.

    Fetches the arrays ``here``, which this process stores, one by one unless there is a proof.
    """

    def is_equal(name: str) -> bool:
        if name not in here:  # other processes store it, or it is no longer saved
            return name in arrays
        content = entry.contents.get(name)
        long = proofs[name].content.digests.long if name in proofs else None
        return content is not None and is_same(content, members_of(plan, name), here[name], long)

    equal = []
    for database in entry.databases.values():
        equal.append(all(map(is_equal, database.arrays)))
        gc.collect(0)  # JAX frees memory that numpy has viewed only then
    return bytes(equal)


def is_same(
    content: Content, members: tuple[str, ...], array: Any, long: bytes | None = None
) -> bool:
    """Returns whether the part of an array that this process stores equals what is stored of it.

    ``long`` has its long digests; by default they are taken.
    """
    block = chunking.block_shape(array, is_stack=len(members) > 1)
    found = members, tuple(array.shape), array.dtype.name, block
    if found != (content.members, content.shape, content.dtype, content.digests.block):
        return False
    if long is None:
        long = block_digests.take_long(array.shape, block, array_writer.parts_to_compare(array))
    rows, stored = (
        np.frombuffer(octets or b"", np.uint8).reshape(-1, 16)
        for octets in (long, content.digests.long)
    )
    here = block_digests.stored_blocks(array, block)
    return len(rows) == len(stored) == here.size and np.array_equal(rows[here], stored[here])


def same_objects(
    proofs: Sequence[Mapping[str, Proof]], leaves: Mapping[str, Any], *, is_alone: bool
) -> list[SameObjects]:
    """Returns what saves of one state to several tiers leave out: what all of them know.

    ``proofs`` are those of each tier, and ``leaves`` the frozen leaves that the saves captured.
    """
    found = [
        name
        for name, proof in proofs[0].items()
        if len({p[name].content.members if name in p else None for p in proofs}) == 1
        and all(leaf in leaves and leaves[leaf] is r() for leaf, r in proof.leaves.items())
    ]
    held = {leaf: leaves[leaf] for name in found for leaf in proofs[0][name].leaves}
    references = {
        name: weakref.ref(array)
        for name, array in leaves.items()
        # Each process may have another array on its own devices; process 0 stores its own.
        if is_proof(array) and (is_alone or not array.is_fully_addressable)
    }
    return [SameObjects({n: each[n] for n in found}, held, references) for each in proofs]


def proofs_of(
    newest: Entry, other: Entry, references: Mapping[str, Reference], *, is_per_host: bool
) -> dict[str, Proof]:
    """Returns proofs of the arrays that two entries have alike, given the leaves of the newest."""
    found = {}
    for name, content in newest.contents.items():
        leaves = {leaf: references[leaf] for leaf in content.members if leaf in references}
        first = leaves[content.members[0]]() if len(leaves) == len(content.members) else None
        stored = other.contents.get(name)
        if first is None or stored is None:
            continue
        shape, sharding = tuple(first.shape), first.sharding
        if content.members != (name,):
            shape, sharding = (len(leaves), *shape), stacked_sharding(sharding)
        form = HostArray(shape, np.dtype(first.dtype), sharding, {})
        here = to_host_part(form) if is_per_host else form
        if is_same(stored, content.members, here, content.digests.long):
            found[name] = Proof(content, leaves, form)
    return found


def is_proof(array: Any) -> bool:
    """Returns whether the identity of an array proves that its values did not change."""
    # On a GPU or a host, DLPack lets an array share memory with a library that changes it.
    return isinstance(array, jax.Array) and _is_on_tpu(array.sharding)


@functools.lru_cache(maxsize=256)
def _is_on_tpu(sharding: Sharding) -> bool:
    devices: Collection[Any] = sharding.device_set
    in_device_memory = sharding.memory_kind in (None, "device")
    return in_device_memory and all(device.platform == "tpu" for device in devices)
