"""Owns where in a step's files a stored chunk lies, for people who look for what was damaged.

TensorStore does not say it: the nodes of the OCDBT database are read for it, one after the other,
which is slow and only done when something is wrong.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import tensorstore as ts
from etils import epath

from torchax_ckpt.storage.medium import location

logger = logging.getLogger(__name__)

# kind, the database it was first written to, file, first byte, number of bytes
_PLACE = re.compile(r"(?:value|btreenode):(.*):(.*):(\d+):(\d+)")


def place_of_chunk(folder: epath.Path, key: str, chunk: Sequence[int]) -> str | None:
    """The file that holds a chunk, and which of its bytes; None where that cannot be found out.

    Args:
      folder: of the database.
      key: of the array in it.
      chunk: place of the chunk in the array's grid.
    """
    wanted = f"{key}/{'.'.join(map(str, chunk)) or '0'}".encode()
    try:
        context = location.reading_context()
        base = ts.KvStore.open(location.kvstore(folder), context=context).result()
        versions = ts.ocdbt.dump(base).result()["versions"]
        todo = [versions[-1]["root"]["location"]]
        while todo:
            node = todo.pop()
            for entry in ts.ocdbt.dump(base, node=node).result()["entries"]:
                if "location" in entry:
                    todo.append(entry["location"])
                elif entry["key"] == wanted:
                    return _named(folder, entry.get("indirect_value", node))
    except Exception as error:  # it must not take the place of the error it is asked for
        logger.info("not known where %s lies in %s: %s", key, folder, error)
    return None


def _named(folder: epath.Path, found: str) -> str | None:
    place = _PLACE.fullmatch(found)
    if place is None:
        return None
    database, file, start, length = place.groups()
    return f"{folder / (database + file)}, bytes {start} to {int(start) + int(length)}"
