"""Lists the files of databases of unchanged arrays, and compares them with those that they had.

A database that has lost a file of array data still has its index, so nothing but a read of the
arrays would notice the loss. A listing of the files shows it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from etils import epath

from torchax_ckpt.layout import unchanged
from torchax_ckpt.storage.medium import bucket, containment, location


class File(NamedTuple):
    """A file of a database: its bytes, and in a bucket what the service says of their content."""

    size: int
    crc32c: str = ""


def present(state: epath.Path) -> dict[str, File]:
    """Returns the files of a step's databases, by name below ``state``; {} if there is no step."""
    if location.is_bucket(state):
        listed = bucket.contents(state, unchanged.FOLDER_PREFIX)
        return {name: File(*content) for name, content in listed.items()}
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for folder in os.listdir(state):
            if folder.startswith(unchanged.FOLDER_PREFIX):
                for path, status in containment.walk(state / folder):
                    found[os.path.relpath(path, state)] = File(status.st_size)
    return found


def differing(known: Mapping[str, File], here: Mapping[str, File]) -> Iterator[str]:
    """Yields in words how known files differ; names the folder if nothing of it is left."""
    folders = {name.partition("/")[0] for name in here}
    gone = {folder for name in known if (folder := name.partition("/")[0]) not in folders}
    for folder in sorted(gone):
        yield f"{folder} is gone"
    for name, before in known.items():
        if name.partition("/")[0] in gone:
            continue
        if (found := here.get(name)) is None:
            yield f"{name} is gone"
        elif found.size != before.size:
            yield f"{name} has {found.size} bytes in place of {before.size}"
        elif found != before:
            yield f"{name} has CRC32C {found.crc32c} in place of {before.crc32c}"
