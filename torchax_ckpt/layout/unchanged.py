"""The manifest's field ``unchanged``: databases of frozen arrays, which several steps may have.

Frozen arrays are stored in databases of their own, which a later step can have too: on a file
system as hard links to the files, in a bucket as objects that the service copies. Each process of a
run writes its parts to a folder of its own; all these folders are the database.

On a disk there are two copies of the frozen arrays, 0 and 1, which share no files. A new step has
another copy than the newest step that is kept beside it, so damage to one file never affects both.
In a bucket, all steps have the same copy.

Two arrays are equal if the 128-bit digests of all their blocks are. Among 2**40 blocks, 64 bits
would give 2**15 pairs of equal digests by chance, 128 bits one pair in 2**49 such runs.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.layout.array_digests import Digests

# As Orbax names the databases that it merges: ``ocdbt.process_`` and an id of letters and digits.
FOLDER_PREFIX = "ocdbt.process_unchanged"
"""How the names of the folders of these databases begin."""
_NAME = re.compile("unchanged(0|[1-9][0-9]{0,8})")
_MAX_PROCESSES = 10**9


@dataclasses.dataclass(frozen=True)
class Database:
    """A database of frozen arrays in a step; ``copy`` is 0 or 1.

    Each of ``processes`` wrote a folder of it; None if one process wrote it all, into one folder.
    """

    copy: int
    arrays: tuple[str, ...]
    processes: tuple[int, ...] | None = None


def name_of(number: int) -> str:
    """Returns the name of a step's database, given its number from 0."""
    return f"unchanged{number}"


def folder_of(name: str, process: int | None = None) -> str:
    """Returns the name of a database's folder: the only one, or that of one of its processes."""
    return f"ocdbt.process_{name}" + ("" if process is None else f"x{process}")


def folders_of(name: str, processes: Sequence[int] | None) -> list[str]:
    """Returns the names of all folders of a database; ``processes`` as in ``Database``."""
    return [folder_of(name, process) for process in ([None] if processes is None else processes)]


def to_json(databases: Mapping[str, Database], digests: Mapping[str, Digests]) -> dict[str, Any]:
    """Returns the manifest's field ``unchanged``, or nothing if there are no databases."""
    if not databases:
        return {}
    content = {}
    for name, database in databases.items():
        known = {stored: digests[stored].long or b"" for stored in database.arrays}
        content[name] = {
            "copy": database.copy,
            **({} if database.processes is None else {"processes": [*database.processes]}),
            "xxh3_128": {s: base64.b64encode(v).decode("ascii") for s, v in known.items()},
        }
    return {"unchanged": content}


def from_json(
    raw: Any, digests: Mapping[str, Digests], *, path: str
) -> tuple[dict[str, Database], dict[str, Digests]]:
    """Returns the databases in the field, and the digests with the long ones in it.

    Raises CorruptCheckpointError, which names ``path``, if the field is malformed.
    """
    databases: dict[str, Database] = {}
    complete = dict(digests)
    try:
        seen: set[str] = set()
        for name, entry in raw.items():
            known = {s: base64.b64decode(v, validate=True) for s, v in entry["xxh3_128"].items()}
            processes = entry.get("processes")
            if (
                not _NAME.fullmatch(name)
                or type(entry["copy"]) is not int
                or entry["copy"] not in (0, 1)
                or not (processes is None or _are_processes(processes))
                or not seen.isdisjoint(known)
                or any(2 * len(digests[s].values) != len(long) for s, long in known.items())
            ):
                raise ValueError(name)
            seen.update(known)
            writers = None if processes is None else tuple(processes)
            databases[name] = Database(entry["copy"], tuple(known), writers)
            for stored, long in known.items():
                complete[stored] = dataclasses.replace(digests[stored], long=long)
    except (AttributeError, TypeError, KeyError, ValueError, binascii.Error) as error:
        raise CorruptCheckpointError(
            f"{path}: expected 'unchanged' to list databases with digests of their arrays, found "
            f"another form ({type(error).__name__}: {error!s:.80}). The file is damaged: use "
            "another step",
            path=path,
        ) from error
    return databases, complete


def _are_processes(raw: Any) -> bool:
    """Returns whether a value from JSON is a list of the indices of processes, in order."""
    return (
        isinstance(raw, list)
        and bool(raw)
        and all(type(index) is int and 0 <= index < _MAX_PROCESSES for index in raw)
        and raw == sorted({*raw})
    )
