"""Finds the leaves that did not change from one save to the next."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.saving.unchanged import known_databases
from torchax_ckpt.saving.unchanged.known_databases import Content
from torchax_ckpt.storage.arrays.chunking import AnyArray

# With fewer bytes of still leaves, more databases would cost more time than they save. Host leaves
# have databases of their own.
_MIN_STILL_BYTES = 1 << 20
# Smaller leaves may change now and then without being worth a rewrite of their database. On the
# host, such are the states of random generators, of up to 5 KiB.
_MIN_LEAF_BYTES, _MIN_HOST_LEAF_BYTES = 1 << 10, 16 << 10


def found(
    plan: Plan,
    arrays: Mapping[str, AnyArray],
    contents: Mapping[str, Content],
    last: Mapping[str, Content],
    known: Collection[str],
) -> frozenset[str]:
    """Returns the leaves that count as still after a save, unless there are few bytes of them.

    Args:
      plan: the storage plan of the save.
      arrays: stored name -> array.
      contents: stored name -> content, for the arrays that later saves may take over.
      last: the same for the save before.
      known: the leaves that counted as still so far.
    """
    sizes: dict[bool, dict[str, int]] = {False: {}, True: {}}  # is on the host -> leaf -> bytes
    for name, now in contents.items():
        array, members = arrays[name], known_databases.members_of(plan, name)
        nbytes = array.size * array.dtype.itemsize // len(members)
        on_host = isinstance(array, np.ndarray)
        if nbytes >= (_MIN_HOST_LEAF_BYTES if on_host else _MIN_LEAF_BYTES):
            sizes[on_host] |= dict.fromkeys(_still_in(name, now, last, known), nbytes)
    worthwhile = (part for part in sizes.values() if sum(part.values()) >= _MIN_STILL_BYTES)
    return frozenset().union(*worthwhile)


def _still_in(
    name: str, now: Content, last: Mapping[str, Content], known: Collection[str]
) -> Iterator[str]:
    """Yields the leaves of an array that did not change since the last save.

    If the last save stored the leaves in another array, a leaf is still if it was.
    """
    before = last.get(name)
    if (
        before is None
        or before.members != now.members
        or before.shape != now.shape
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
