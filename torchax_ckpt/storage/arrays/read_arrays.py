"""Reads stored arrays piece by piece, and compares them with their digests.

Reads through TensorStore, because Orbax gives no access to the bytes between storage and devices.
"""

from __future__ import annotations

import collections
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts
from etils import epath

from torchax_ckpt.errors import CorruptCheckpointError, DirectoryError
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.runtime import progress
from torchax_ckpt.runtime.background import Flag
from torchax_ckpt.storage.arrays import block_digests, tensorstore_context
from torchax_ckpt.storage.arrays.array_checks import stored_key
from torchax_ckpt.storage.arrays.assembly import (
    Piece,
    Target,
    Wanted,
    empty,
)
from torchax_ckpt.storage.directory.committed_step import STATE, CommittedStep
from torchax_ckpt.storage.directory.step_files import as_corrupt, await_read, soon
from torchax_ckpt.storage.medium import medium, storage_errors

logger = logging.getLogger(__name__)

# The default limit for programs that run beside a training program and must not take its memory.
STREAMED_BYTES = 256 << 20
# A place in TensorStore's text form: kind, database that first wrote it, file, first byte, number
# of bytes.
_PLACE = re.compile(r"(?:value|btreenode):(.*):(.*):(\d+):(\d+)")


def stream_arrays(
    committed: CommittedStep,
    wanted: Mapping[str, Wanted],
    options: CheckpointOptions,
    is_wanted: Callable[[str, Piece], bool] = lambda name, piece: True,
) -> Iterator[tuple[str, Piece, np.ndarray]]:
    """Yields stored name, piece and checked content of the wanted pieces, in bounded memory."""
    targets = [Target(name, want, {}) for name, want in wanted.items()]
    pace = pace_of(options)
    stores = opened(committed, wanted, pace)
    default = int(STREAMED_BYTES * medium.of(committed.path).streamed_share)
    max_bytes, in_flight_bytes = options.max_host_bytes or default, 0
    reading: collections.deque[tuple[str, Piece, Arrival]] = collections.deque()
    for target in targets:
        store = stores[target.name]
        for piece in target.pieces(chunk_of(store)):
            if not is_wanted(target.name, piece):
                continue
            while reading and in_flight_bytes + piece.nbytes > max_bytes:
                name, oldest, arrival = reading.popleft()
                yield name, oldest, arrival.fetch()
                in_flight_bytes -= oldest.nbytes
            in_flight_bytes += piece.nbytes
            reading.append((target.name, piece, Arrival(committed, target, piece, store, pace)))
    while reading:
        name, oldest, arrival = reading.popleft()
        yield name, oldest, arrival.fetch()


def opened(
    committed: CommittedStep, wanted: Mapping[str, Wanted], pace: progress.Pace
) -> dict[str, ts.TensorStore]:
    """Checks that digests fit the arrays' shapes; returns the opened arrays by stored name."""
    for name, want in wanted.items():
        if want.digests is not None and not block_digests.fit(want.digests, want.shape):
            raise committed.error(
                CorruptCheckpointError,
                f"{name}: the manifest has digests of blocks {list(want.digests.block)}, which do "
                f"not fit the shape {list(want.shape)}",
                name,
            )
    context = tensorstore_context.reading_context()
    base = _kvstore(committed)
    opening = {
        name: ts.open(
            {
                "driver": "zarr",
                "kvstore": {**base, "path": stored_key(name) + "/"},
                # Otherwise TensorStore reads a missing chunk as zeros.
                "fill_missing_data_reads": False,
            },
            open=True,
            read=True,
            context=context,
        )
        for name in wanted
    }
    stores = {}
    for name, future in opening.items():
        await_read(committed, name, future, pace)
        pace.restart()
        with as_corrupt(committed, name):
            stores[name] = future.result()
    return stores


def pace_of(options: CheckpointOptions) -> progress.Pace:
    """Returns a new pace for the reads of one call."""
    # Below the timeout, so that other processes still wait for this one when it raises.
    limit_secs = 0.9 * options.process_timeout_secs
    return progress.Pace(options.min_read_bytes_per_sec, limit_secs)


def chunk_of(store: ts.TensorStore) -> tuple[int, ...]:
    """Returns the shape of the pieces in which an array is stored."""
    return tuple(int(length or 1) for length in store.chunk_layout.read_chunk.shape or ())


def _kvstore(committed: CommittedStep) -> dict[str, Any]:
    folder = committed.path / STATE
    base = medium.of(folder).database_to_read(folder)
    return {"driver": "ocdbt", "cache_pool": "cache_pool#ocdbt", **base}


class Arrival:
    """Reads one piece from storage to the host, checks it, and hands it to its target.

    The thread of TensorStore that read a piece also compares it: in parallel with others, and while
    the piece is in the processor's cache.
    """

    def __init__(
        self,
        committed: CommittedStep,
        target: Target,
        piece: Piece,
        store: ts.TensorStore,
        pace: progress.Pace,
        on_bytes: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._on_bytes = on_bytes
        self._committed, self._target, self._piece, self._pace = committed, target, piece, pace
        self._store, self._chunk = store, chunk_of(store)
        self._host = empty(piece.shape, store.dtype.numpy_dtype)
        source = store[piece.index][ts.d[:].translate_to[0]]
        self._wrong: Sequence[tuple[int, ...]] = ()
        self._failure: BaseException | None = None
        self._is_compared = Flag()
        self._future = ts.array(self._host, dtype=store.dtype).write(source)
        pace.add(piece.nbytes)
        self._future.add_done_callback(self._compare)

    def _compare(self, read: ts.Future) -> None:
        known, shape = self._target.wanted.digests, self._target.wanted.shape
        try:
            if known is not None and read.exception() is None:
                self._wrong = block_digests.mismatches(self._host, self._piece.start, known, shape)
        except BaseException as error:  # raised again on the thread that waits
            self._failure = error
        finally:
            self._pace.add(0, self._piece.nbytes)
            self._is_compared.set()

    def finish(self) -> tuple[int, list[Any]]:
        """Waits for the piece, passes it to ``Target.arrived``, and returns that call's result."""
        return self._target.arrived(self._piece, self.fetch())

    def fetch(self) -> np.ndarray:
        """Waits until the piece is read and returns it; raises if it is unreadable or damaged."""
        await_read(
            self._committed, self._target.name, self._future, self._pace, self._place_of_start
        )
        try:
            with as_corrupt(self._committed, self._target.name):
                self._future.result()
        except CorruptCheckpointError as error:
            raise self._undecodable(error) from error.__cause__
        except DirectoryError as error:
            chunk = soon(self._first_unreadable)
            if chunk is not None and (place := self._place(chunk)) is not None:
                error.message += f" The first part that cannot be read lies in {place}."
                error.file = place.file
            raise
        self._is_compared.wait()
        if self._failure is not None:
            raise self._failure
        if self._wrong:
            raise self._damaged(self._wrong)
        self._on_bytes(self._piece.nbytes)
        return self._host

    def _damaged(self, wrong: Sequence[tuple[int, ...]]) -> CorruptCheckpointError:
        known = self._target.wanted.digests
        assert known is not None
        chunk = [i * b // c for i, b, c in zip(wrong[0], known.block, self._chunk, strict=True)]
        place = self._place(chunk)
        return self._about(
            {cell[0] for cell in wrong if cell},
            f"the stored bytes are not those that were saved ({len(wrong)} of the blocks read "
            f"differ from their digests{f'; the first lies in {place}' if place else ''}). The "
            "storage has damaged them; restore another step, or a copy of this one.",
            place,
        )

    def _undecodable(self, error: CorruptCheckpointError) -> CorruptCheckpointError:
        """Returns ``error`` extended by the leaves and the file of the first unreadable chunk."""
        start, shape = self._piece.start, self._piece.shape
        rows, place = range(start[0], start[0] + shape[0]) if shape else range(0), None
        if (chunk := self._first_unreadable()) is not None:
            place = self._place(chunk)
            if chunk:
                first = chunk[0] * self._chunk[0]
                rows = range(max(rows.start, first), min(rows.stop, first + self._chunk[0]))
        return self._about(
            rows,
            f"cannot be read: {storage_errors.said(error)}"
            + (f". The first unreadable part lies in {place}" if place else ""),
            place,
        )

    def _first_unreadable(self) -> tuple[int, ...] | None:
        """Reads the piece's chunks one by one; returns the first unreadable one, or None."""
        grid = [
            range(start // size, -(-(start + length) // size))
            for start, length, size in zip(
                self._piece.start, self._piece.shape, self._chunk, strict=True
            )
        ]
        for chunk in itertools.product(*grid):
            corner = tuple(i * size for i, size in zip(chunk, self._chunk, strict=True))
            try:
                self._store[corner].read().result()
            except Exception:
                return chunk
        return None

    def _place_of_start(self) -> Place | None:
        return self._place([s // n for s, n in zip(self._piece.start, self._chunk, strict=True)])

    def _place(self, chunk: Sequence[int]) -> Place | None:
        folder = self._committed.path / STATE
        return place_of_chunk(folder, stored_key(self._target.name), chunk)

    def _about(
        self, rows: Iterable[int], problem: str, place: Place | None
    ) -> CorruptCheckpointError:
        """Returns an error that names the stack members in ``rows``, or the unstacked array."""
        members, name = self._target.wanted.members, self._target.name
        leaves = sorted({members[row] for row in rows}) if members else [name]
        named = ", ".join(leaves[:3]) + (f" and {len(leaves) - 3} more" if len(leaves) > 3 else "")
        return self._committed.error(
            CorruptCheckpointError, f"{named}: {problem}", leaves[0], place and place.file
        )


class Place(NamedTuple):
    """The bytes of a file that hold a chunk."""

    file: str
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.file}, bytes {self.begin} to {self.end}"


def place_of_chunk(folder: epath.Path, key: str, chunk: Sequence[int]) -> Place | None:
    """Returns the file and byte range that hold a chunk of a database's array, if they are found.

    TensorStore's errors do not name the file. Slow: reads the database's nodes one after another.
    """
    wanted = f"{key}/{'.'.join(map(str, chunk)) or '0'}".encode()
    try:
        context = tensorstore_context.reading_context()
        base = ts.KvStore.open(medium.of(folder).kvstore(folder), context=context).result()
        versions = ts.ocdbt.dump(base).result()["versions"]
        todo = [versions[-1]["root"]["location"]]
        while todo:
            node = todo.pop()
            for entry in ts.ocdbt.dump(base, node=node).result()["entries"]:
                if "location" in entry:
                    todo.append(entry["location"])
                elif entry["key"] == wanted:
                    if (place := _PLACE.fullmatch(entry.get("indirect_value", node))) is None:
                        return None
                    database, file, start, length = place.groups()
                    path = os.fspath(folder / (database + file))
                    return Place(path, int(start), int(start) + int(length))
    except Exception as error:  # must not replace the error that is being reported
        logger.debug("cannot locate the damaged chunk of %s in %s: %s", key, folder, error)
    return None
