"""Compares the arrays of a save with databases of earlier steps, on all processes of the run.

Process 0 offers the databases that the save could take over. Each process computes the long digests
of the blocks that it has, and sends them to process 0, which compares them with those of the stored
arrays. So an array counts as equal only if some process has sent the digest of each of its blocks,
and all of these digests are equal to the stored ones.

If nobody in this run has read a database, one process reads it, and sends the digests of what it
has read.
"""

from __future__ import annotations

import base64
import dataclasses
import gc
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import xxhash
from etils import epath

from torchax_ckpt.errors import ProcessError
from torchax_ckpt.layout import unchanged
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.saving.unchanged import index_runs
from torchax_ckpt.saving.unchanged.index_runs import Runs
from torchax_ckpt.saving.unchanged.known_databases import Content, KnownDatabase
from torchax_ckpt.snapshot.host_array import HostArray, Offset
from torchax_ckpt.storage.arrays import block_digests
from torchax_ckpt.storage.arrays.chunking import AnyArray
from torchax_ckpt.storage.directory.committed_step import STATE
from torchax_ckpt.storage.writing import databases, fetching

logger = logging.getLogger(__name__)

_Digests = Mapping[str, Sequence[str]]
"""Name of an array -> the numbers of its blocks, and their long digests, both in base64."""


@dataclasses.dataclass(frozen=True)
class Taken:
    """The long digests of the blocks of an array that this process has.

    Attributes:
      block: the shape of the blocks.
      sent: the digests, as ``encoded`` returns them.
    """

    block: tuple[int, ...]
    sent: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Offer:
    """A database that a save could take over.

    Attributes:
      arrays: for each array in the database: its stored name, shape, dtype, and the shape of its
        blocks.
      unread: if the database must be read before it is taken over: the name of the step's folder,
        the name of the database, and the processes that wrote it as runs (None if one process
        did); else None.
    """

    arrays: Sequence[tuple[str, Sequence[int], str, Sequence[int]]]
    unread: tuple[str, str, Runs | None] | None

    @classmethod
    def of(cls, stored: KnownDatabase, step_name: str) -> Offer:
        """Returns the offer of a database in a step, given the name of the step's folder."""
        runs = None if stored.processes is None else index_runs.runs_of(stored.processes)
        return cls(
            [(n, c.shape, c.dtype, c.digests.block) for n, c in stored.contents.items()],
            None if stored.is_verified else (step_name, stored.name, runs),
        )

    def folders(self) -> list[str]:
        """Returns the folders to read, relative to the directory of the run."""
        if self.unread is None:
            return []
        step_name, name, runs = self.unread
        return folders_of(step_name, name, None if runs is None else index_runs.indices_of(runs))


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one process knows about the offers.

    Attributes:
      stacks: a digest of the storage plan's stacks, which must be equal on all processes.
      live: for each offer, the digests of the arrays to save.
      stored: for each offer, the digests of the stored arrays, if this process has read them.
    """

    stacks: str
    live: Sequence[_Digests]
    stored: Sequence[_Digests]

    def to_bytes(self) -> bytes:
        """Returns the answer as a message to process 0."""
        return json.dumps(dataclasses.asdict(self)).encode()

    def taken(self, offers: Sequence[Offer]) -> dict[str, Taken]:
        """Returns stored name -> digests, for the arrays to save that were compared."""
        return {
            name: Taken(tuple(block), live[name])
            for offer, live in zip(offers, self.live, strict=True)
            for name, _, _, block in offer.arrays
            if name in live
        }

    @classmethod
    def of_bytes(cls, sent: bytes) -> Answer:
        """Returns the answer that ``to_bytes`` serialized."""
        return cls(**json.loads(sent))


def answer(
    offers: Sequence[Offer],
    plan: Plan,
    arrays: Mapping[str, AnyArray],
    taken: Mapping[str, Taken],
    directory: epath.Path,
    processes: Processes,
    known: Sequence[Mapping[str, Content]] | None,
) -> Answer:
    """Returns what this process knows about the offers, which are the same on all processes.

    Fetches the arrays of the databases that the save could take over, one after another, but those
    in ``taken``. ``known`` has on process 0 the content of each offer's database: if the part of an
    array that this process has is another one, the database is not read.
    """
    live: list[_Digests] = []
    stored: list[_Digests] = []
    for number, offer in enumerate(offers):
        here: dict[str, Sequence[str]] = {}
        has_all = all(_may_be(arrays.get(n), s, d, b) for n, s, d, b in offer.arrays)
        # Other processes have no host arrays.
        on_host = [has_all and isinstance(arrays[name], np.ndarray) for name, *_ in offer.arrays]
        has_all = has_all and len({*on_host}) == 1  # else one place could not store them
        for name, shape, _, block in offer.arrays if has_all else ():
            if (mine := taken.get(name)) is None:
                parts = _parts(arrays[name], tuple(block))
                here[name] = encoded(block_digests.take_long(shape, tuple(block), parts))
                del parts
            elif mine.block == tuple(block):
                here[name] = mine.sent
        gc.collect(0)  # JAX frees memory that numpy has viewed only then
        live.append(here)
        may_be_equal = has_all and not (
            known and any(_differs(known[number][name], sent) for name, sent in here.items())
        )
        is_mine = any(on_host) or number % processes.count == processes.index
        if offer.unread and is_mine and may_be_equal:
            stored.append(_read(offer, [directory / folder for folder in offer.folders()]))
        else:
            stored.append({})
    stacks = json.dumps(sorted(plan.stacks.items())).encode()
    return Answer(xxhash.xxh3_128_hexdigest(stacks), live, stored)


def folders_of(step_name: str, name: str, processes: Sequence[int] | None) -> list[str]:
    """Returns the folders of a database in a step, relative to the directory of the run."""
    return [f"{step_name}/{STATE}/{folder}" for folder in unchanged.folders_of(name, processes)]


def require_same_stacks(answers: Sequence[Answer]) -> None:
    """Raises ProcessError if the processes have different storage plans."""
    for index, answer in enumerate(answers):
        if answer.stacks != answers[0].stacks:
            raise ProcessError(
                f"process {index} stacks other leaves than process 0: expected the same names, "
                "shapes, dtypes and shardings on all processes. Pass the same objects to "
                "Checkpointer.attach on every process."
            )


def are_equal(contents: Mapping[str, Content], sent: Sequence[_Digests]) -> bool:
    """Returns whether the digests that all processes sent are those of all blocks of some arrays.

    Args:
      contents: stored name -> the array.
      sent: what each process sent.
    """
    return all(
        _is_equal(content, [digests[name] for digests in sent if name in digests])
        for name, content in contents.items()
    )


def _is_equal(content: Content, sent: Iterable[Sequence[str]]) -> bool:
    expected = _rows(content.digests.long or b"")
    is_known = np.zeros(len(expected), bool)
    for digests in sent:
        where, rows = _decoded(digests)
        if where.size and where.max() >= len(expected):
            return False
        if not np.array_equal(expected[where], rows):
            return False
        is_known[where] = True
    return bool(is_known.all()) and len(expected) > 0


def _may_be(array: AnyArray | None, shape: Sequence[int], dtype: str, block: Sequence[int]) -> bool:
    """Returns whether a database may hold the values of an array."""
    return (
        array is not None
        and tuple(array.shape) == tuple(shape)
        and array.dtype.name == dtype
        and len(block) == len(shape)
    )


def _differs(content: Content, sent: Sequence[str]) -> bool:
    where, rows = _decoded(sent)
    expected = _rows(content.digests.long or b"")
    return bool(where.size) and not np.array_equal(expected[where], rows)


def _parts(array: AnyArray, block: tuple[int, ...]) -> Mapping[Offset, np.ndarray]:
    """Returns parts of an array that consist of whole blocks; together, the processes have all.

    A step of another mesh may have blocks that are not those of any process. They are left out.
    """
    parts = fetching.start(array)()
    if isinstance(array, np.ndarray):
        return parts
    if all(
        start % length == 0 and size % length == 0
        for first, part in parts.items()
        for start, size, length in zip(first, part.shape, block, strict=True)
    ):
        return parts
    return _joined(fetching.fetched_shards(array), block)


def _joined(array: HostArray, block: tuple[int, ...]) -> Mapping[Offset, np.ndarray]:
    """Joins the shards of this process, if they form a box, and cuts the box to whole blocks."""
    starts = np.array([*array.parts], int).reshape(len(array.parts), array.ndim)
    shape = next(iter(array.parts.values())).shape
    low, high = starts.min(axis=0), starts.max(axis=0) + shape
    if len(array.parts) * math.prod(shape) != math.prod((high - low).tolist()):
        return {}
    box = np.empty(high - low, array.dtype)
    for start, part in array.parts.items():
        first = np.array(start, int) - low
        box[tuple(slice(f, f + n) for f, n in zip(first, shape, strict=True))] = part
    lengths = np.array(block, int)
    first, last = -(-low // lengths) * lengths, high // lengths * lengths
    if not (first < last).all():
        return {}
    within = tuple(slice(f, n) for f, n in zip(first - low, last - low, strict=True))
    return {tuple(first.tolist()): box[within]}


def _read(offer: Offer, folders: Sequence[epath.Path]) -> _Digests:
    """Reads a database; returns nothing if it is damaged."""
    names = [name for name, *_ in offer.arrays]
    if not all(databases.has_only(folder, names) for folder in folders):
        logger.warning("%s has other arrays than it should", folders[0])
        return {}
    found = {}
    for name, shape, dtype, block in offer.arrays:
        if (host := databases.read(folders, name, shape, dtype)) is None:
            return {}
        parts = {(0,) * len(shape): host}
        found[name] = encoded(block_digests.take_long(shape, tuple(block), parts))
    return found


def encoded(long: bytes) -> Sequence[str]:
    """Returns long digests of blocks as text, without those that are zero: of no block here."""
    rows = _rows(long)
    where = np.flatnonzero(rows.any(axis=1))
    octets = where.astype("<u8").tobytes(), rows[where].tobytes()
    return [base64.b64encode(part).decode("ascii") for part in octets]


def _decoded(sent: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    where, rows = (base64.b64decode(part, validate=True) for part in sent)
    return np.frombuffer(where, "<u8"), _rows(rows)


def _rows(long: bytes) -> np.ndarray:
    return np.frombuffer(long, np.uint8).reshape(-1, 16)
