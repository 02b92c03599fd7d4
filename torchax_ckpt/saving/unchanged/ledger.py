"""What committed steps have in databases of unchanged arrays, as each process of the run knows it.

An entry is recorded only for a step that was committed on all processes, or that was read and
compared with its digests: what a failed save has sent is stored in no step. An array counts as
unchanged only if the 128-bit digest of each of its blocks is equal to that of the stored block, on
the process that stores the block.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from torchax_ckpt.layout.manifest import Manifest
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.layout.unchanged import Database, Digests
from torchax_ckpt.storage.arrays import block_digests, chunking
from torchax_ckpt.storage.arrays.chunking import AnyArray
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.medium.stored_file import StoredFile
from torchax_ckpt.storage.writing import fetching

Reference: TypeAlias = "weakref.ref[jax.Array]"

# With fewer bytes of still leaves, more databases would cost more time than they save. Host leaves
# have databases of their own.
_MIN_STILL_BYTES = 1 << 20
# Smaller leaves may change now and then without being worth a rewrite of their database. On the
# host, such are the states of random generators, of up to 5 KiB.
_MIN_LEAF_BYTES, _MIN_HOST_LEAF_BYTES = 1 << 10, 16 << 10


@dataclasses.dataclass(frozen=True)
class Content:
    """What a stored array holds: its leaves, in order, and the digests of its blocks."""

    members: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    digests: Digests  # 0 for blocks that only other processes know


@dataclasses.dataclass(frozen=True)
class Entry:
    """The databases of unchanged arrays of one step."""

    key: Key  # the step's number and commit time
    copy: int  # which of the two copies of the unchanged arrays the step has
    databases: Mapping[str, Database]  # in the same order on all processes
    contents: Mapping[str, Content]  # stored name -> content, of arrays that this process knows
    # Leaf -> the object that has its values, if the identity of the object proves it.
    references: Mapping[str, Reference] = dataclasses.field(default_factory=dict)
    files: Mapping[str, StoredFile] = dataclasses.field(default_factory=dict)  # on process 0


def members_of(plan: Plan, name: str) -> tuple[str, ...]:
    """Returns the leaves in a stored array, in order."""
    return plan.stacks.get(name) or (name,)


def contents_of_save(
    plan: Plan, arrays: Mapping[str, AnyArray], digests: Mapping[str, Digests]
) -> dict[str, Content]:
    """Returns stored name -> content, for the arrays that have digests."""
    return {
        name: Content(members_of(plan, name), tuple(array.shape), array.dtype.name, digests[name])
        for name, array in arrays.items()
        if name in digests
    }


def contents_of_step(manifest: Manifest) -> dict[str, Content]:
    """Returns stored name -> content, for the arrays of a step that have digests that fit."""
    return {
        name: Content(members_of(manifest.plan, name), shape, dtype, digests)
        for name, (shape, dtype) in manifest.stored(manifest.leaves).items()
        if (digests := manifest.digests.get(name)) and block_digests.fit(digests, shape)
    }


def are_on_host(
    names: Collection[str], arrays: Collection[str], here: Mapping[str, AnyArray]
) -> bool | None:
    """Returns whether process 0 stores arrays alone; None if not all, or if one is not saved.

    ``arrays`` are those of the save, and ``here`` has those that this process stores.
    """
    if not all(name in arrays for name in names):
        return None
    kinds = {name not in here or isinstance(here[name], np.ndarray) for name in names}
    return kinds.pop() if len(kinds) == 1 else None


def compare(
    entry: Entry,
    plan: Plan,
    arrays: Collection[str],
    here: Mapping[str, AnyArray],
    known: Mapping[str, bytes],
    *,
    is_first: bool,
) -> int:
    """Returns one bit for each database of an entry: whether what is stored here of it is equal.

    Fetches the arrays one after another, but those whose long digests are ``known``.
    """
    equal = 0
    for number, database in enumerate(entry.databases.values()):
        on_host = are_on_host(database.arrays, arrays, here)
        if on_host is not None:
            is_equal = (on_host and not is_first) or all(
                name in entry.contents
                and is_same(
                    entry.contents[name], members_of(plan, name), here[name], known.get(name)
                )
                for name in database.arrays
            )
            equal |= is_equal << number
        gc.collect(0)  # JAX frees memory that numpy has viewed only then
    return equal


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
        long = block_digests.take_long(array.shape, block, fetching.to_compare(array))
    rows, stored = (
        np.frombuffer(octets or b"", np.uint8).reshape(-1, 16)
        for octets in (long, content.digests.long)
    )
    here = block_digests.stored_blocks(array, block)
    return len(rows) == len(stored) == here.size and np.array_equal(rows[here], stored[here])


def still_leaves(
    contents: Mapping[str, Content],
    last: Mapping[str, Content],
    known: Collection[str],
    arrays: Mapping[str, AnyArray],
) -> frozenset[str]:
    """Returns the leaves that did not change since the ``last`` save, unless they have few bytes.

    ``known`` has the leaves that counted as still so far.
    """
    sizes: dict[bool, dict[str, int]] = {False: {}, True: {}}  # is on the host -> leaf -> bytes
    for name, now in contents.items():
        array = arrays[name]
        nbytes = array.size * array.dtype.itemsize // len(now.members)
        on_host = isinstance(array, np.ndarray)
        if nbytes >= (_MIN_HOST_LEAF_BYTES if on_host else _MIN_LEAF_BYTES):
            sizes[on_host] |= dict.fromkeys(_still_in(now, last.get(name), known), nbytes)
    worthwhile = (part for part in sizes.values() if sum(part.values()) >= _MIN_STILL_BYTES)
    return frozenset().union(*worthwhile)


def _still_in(now: Content, before: Content | None, known: Collection[str]) -> Iterator[str]:
    """Yields the leaves that are still; if their array was another one, those that were still."""
    if (
        before is None
        or (before.members, before.shape) != (now.members, now.shape)
        or before.digests.block != now.digests.block
    ):
        yield from (leaf for leaf in now.members if leaf in known)
        return
    digests = (
        np.frombuffer(content.digests.values, "<u8").reshape(len(now.members), -1)
        for content in (before, now)
    )
    is_equal = np.equal(*digests).all(axis=1)
    yield from (leaf for leaf, equal in zip(now.members, is_equal, strict=True) if equal)
