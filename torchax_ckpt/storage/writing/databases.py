"""Stores unchanged arrays in databases of their own, or links databases of earlier steps.

Orbax merges the databases of a step into one, whichever their number, so a reader does not see the
difference. ``layout/unchanged.py`` tells what the databases are for.

Source: Orbax 0.12.8 merges all folders of an item that are named ``ocdbt.process_`` and an id; an
OCDBT database refers to its files by paths relative to its folder.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import tensorstore as ts
from etils import epath

from torchax_ckpt.layout import unchanged
from torchax_ckpt.layout.digests import Digests
from torchax_ckpt.storage.arrays import array_checks, block_digests
from torchax_ckpt.storage.arrays.placed_array import Place
from torchax_ckpt.storage.medium import links, location

logger = logging.getLogger(__name__)

_Write = Callable[[dict[str, Any], Any], Awaitable[None]]


class Fresh(Place):
    """A database that one save writes.

    All arrays of the database are written in one transaction, so that the database has few files
    and no bytes that a later version of its index would leave unused.

    Args:
      name: the name of the database, see ``layout/unchanged.py``.
      count: the number of arrays that are stored in the database.
    """

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self._num_missing = count
        self._transaction = ts.Transaction(atomic=True)

    async def store(self, spec: dict[str, Any], write: _Write) -> None:
        """Adds an array to the database; the last array makes the database durable."""
        await write(_in_database(spec, self.name), self._transaction)
        self._num_missing -= 1
        if not self._num_missing:
            await self._transaction.commit_async()


class Linked(Place):
    """A database that an earlier step has, and that the new step links.

    Args:
      name: the name of the database in the new step.
      source: the folder of the database in the earlier step.
    """

    def __init__(self, name: str, source: epath.Path) -> None:
        self.name = name
        self.source = source
        self._is_linked = False

    async def store(self, spec: dict[str, Any], write: _Write) -> None:
        """Links the database if this is its first array; the array's values are not written."""
        if not self._is_linked:
            self._is_linked = True
            target = epath.Path(spec["kvstore"]["base"]["path"]).parent
            target = target / unchanged.folder_of(self.name)
            await asyncio.to_thread(links.link_folder, self.source, target)


def has_only(folder: epath.Path, names: Iterable[str]) -> bool:
    """Returns whether a database has no other arrays than those with the given stored names."""
    known = {array_checks.stored_key(name) for name in names}
    spec = {"driver": "ocdbt", "base": location.kvstore(folder)}
    try:
        found = ts.KvStore.open(spec, context=location.reading_context()).result().list().result()
    except (ValueError, OSError, RuntimeError) as error:  # TensorStore's errors
        logger.info("%s cannot be read: %s", folder, error)
        return False
    return {key.decode(errors="replace").rpartition("/")[0] for key in found} <= known


def holds(folder: epath.Path, name: str, shape: Sequence[int], dtype: str, known: Digests) -> bool:
    """Reads an array of a database; returns whether its blocks have the known long digests.

    Args:
      folder: the folder of the database.
      name: the stored name of the array.
      shape, dtype: the array's, as the manifest of its step records them.
      known: the array's digests, with long ones.
    """
    base, path = location.kvstore(folder), f"{array_checks.stored_key(name)}/"
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": path}}
    try:
        array = ts.open(spec, open=True, context=location.reading_context()).result()
        if (tuple(array.shape), array.dtype.numpy_dtype.name) != (tuple(shape), dtype):
            return False
        host = array.read().result()
    except (ValueError, OSError, RuntimeError) as error:  # TensorStore's errors
        logger.info("%s: %s cannot be read: %s", folder, name, error)
        return False
    return block_digests.take_long(shape, known.block, {(0,) * len(shape): host}) == known.long


def _in_database(spec: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the spec of an array in the database ``name`` of the same step."""
    kvstore = dict(spec["kvstore"])
    for part in ("base", "manifest"):
        path = epath.Path(kvstore[part]["path"]).parent / unchanged.folder_of(name)
        kvstore[part] = {**kvstore[part], "path": f"{path}/"}
    return {**spec, "kvstore": kvstore}
