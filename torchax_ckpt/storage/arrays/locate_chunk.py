"""Locates a stored chunk in a step's files, so that an error can name the damaged file.

TensorStore's errors do not name the file that holds an unreadable chunk. The arrays of a step are
stored in an OCDBT database. This module reads the nodes of the database one after the other until
it finds the chunk. The search is slow, so it runs only after an error.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import tensorstore as ts
from etils import epath

from torchax_ckpt.storage.medium import location

logger = logging.getLogger(__name__)

# A place in TensorStore's text form: kind, database that first wrote it, file, first byte, number
# of bytes.
_PLACE = re.compile(r"(?:value|btreenode):(.*):(.*):(\d+):(\d+)")


def place_of_chunk(folder: epath.Path, key: str, chunk: Sequence[int]) -> str | None:
    """Returns the file and the byte range that hold a chunk; None if the chunk is not found.

    Args:
      folder: the folder of the database.
      key: the key of the array in the database.
      chunk: the indices of the chunk in the array's grid of chunks.
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
                    return _described(folder, entry.get("indirect_value", node))
    except Exception as error:  # must not replace the error that is being reported
        logger.info("cannot locate the damaged chunk of %s in %s: %s", key, folder, error)
    return None


def _described(folder: epath.Path, found: str) -> str | None:
    """Returns TensorStore's location text as file and byte range; None if it cannot be parsed."""
    place = _PLACE.fullmatch(found)
    if place is None:
        return None
    database, file, start, length = place.groups()
    return f"{folder / (database + file)}, bytes {start} to {int(start) + int(length)}"
