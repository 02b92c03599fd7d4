"""Moves the device arrays of a step through the host: fetches, digests, writes and releases them.

The arrays move in batches, and only one batch is on the host at a time. JAX keeps the fetched bytes
beside an array as long as that array exists, and Orbax holds all arrays of a step until the step is
written. Each batch is therefore fetched through temporary arrays, which share the buffers of the
original arrays. The digests are computed from the same bytes that Orbax writes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import gc
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

import jax
import numpy as np

from torchax_ckpt.errors import SaveError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Digests
from torchax_ckpt.snapshot.device_programs import sliced
from torchax_ckpt.snapshot.device_sizes import HOST_MEMORY
from torchax_ckpt.snapshot.host_array import HostArray, Start, start_of
from torchax_ckpt.snapshot.sharding import shards_of, unshared
from torchax_ckpt.storage.arrays import block_digests, chunking, orbax_internals
from torchax_ckpt.storage.arrays.chunking import AnyArray
from torchax_ckpt.storage.arrays.placed_array import Place, PlacedArray, placed_on_host
from torchax_ckpt.storage.writing import databases

_Write = Callable[[Sequence[Any]], Awaitable[Awaitable[None]]]
_Fetch = Callable[[], HostArray]
"""Waits for the transfers of an array that have begun, and returns the array on the host."""


class Batches(orbax_internals.StatusCallback):
    """Fetches, digests and writes the device arrays of one save in batches.

    Orbax passes this object, as the callback of a save, to the handler of device arrays
    (``orbax_internals.PyTreeInBatches``). Orbax knows the device arrays as ``announced`` only, and
    gets their values from this object. Orbax writes host arrays without the help of this object;
    this object computes their digests, except of linked arrays.

    Args:
      arrays: stored name -> array.
      stacks: the names of the arrays that are stacks.
      max_bytes: most bytes of device arrays in a batch, unless a single array is larger; None for
        one batch of all arrays.
      places: name -> where an array is stored, if not in Orbax's database of this process.
      on_host: called for each batch when it is on the host, on any thread, with the number of the
        batch (from 1), the number of batches, and the bytes of the batch. The bytes of host arrays
        count towards the first batch.

    Attributes:
      on_devices: a future of the digests of the device arrays. It has a result when the digests
        of the last batch are known. It fails with the error of a batch, and is cancelled if Orbax
        gives up the save.
    """

    def __init__(
        self,
        arrays: Mapping[str, AnyArray],
        stacks: Collection[str],
        places: Mapping[str, Place],
        max_bytes: int | None,
        on_host: Callable[[int, int, int], None],
    ) -> None:
        self._device = {n: a for n, a in arrays.items() if not isinstance(a, np.ndarray)}
        linked = {n: place for n, place in places.items() if isinstance(place, databases.Linked)}
        self._linked = {n: self._device.pop(n) for n in linked if n in self._device}
        self._places = places
        host = {n: a for n, a in arrays.items() if isinstance(a, np.ndarray)}
        self._host = {n: a for n, a in host.items() if n not in linked}
        self._device_places = [place for n, place in places.items() if n not in host]
        self._stacks = stacks
        self._on_host = on_host
        self._is_over = False
        self.on_devices: concurrent.futures.Future[dict[str, Digests]] = concurrent.futures.Future()
        self._batches = [*_cut(self._device, max_bytes)] or [[]] * bool(self._linked)
        # The first batch is fetched while Orbax prepares the save.
        self._first = self._started(self._batches[0]) if self._batches else {}
        self._host_bytes = sum(array.nbytes for array in self._host.values())
        if not self._batches:  # then Orbax does not call ``write``
            self._on_host(1, 1, self._host_bytes)
            self.on_devices.set_result({})

    def taken(self) -> dict[str, Digests]:
        """Waits for the last batch; returns the digests of the blocks that this process stores.

        Raises:
          SaveError: the bytes of a boolean array are other than 0 and 1.
        """
        on_host = {n: self._digests(n, a, {(0,) * a.ndim: a}) for n, a in self._host.items()}
        return on_host | self.on_devices.result()

    def writing(self, params: Sequence[Any], write: _Write) -> _Writing:
        """Returns an awaitable that calls ``self.write(params, write)`` when Orbax awaits it."""
        return _Writing(self, params, write)

    async def write(self, params: Sequence[Any], write: _Write) -> None:
        """Writes all device arrays, batch by batch.

        Args:
          params: the parameters of Orbax's handler of arrays, each with an array and its path.
          write: the handler's method that takes fetched arrays, and returns an awaitable that
            writes them.
        """
        if not self.on_devices.set_running_or_notify_cancel():
            return
        taken: dict[str, Digests] = {}
        try:
            by_path = {tuple(key.key for key in param.keypath): param for param in params}
            for number, batch in enumerate(self._batches, 1):
                if self._is_over:
                    raise asyncio.CancelledError
                coming, self._first = self._first or self._started(batch), {}
                fetched = {name: fetch() for name, fetch in coming.items()}
                del coming  # with the temporary arrays
                nbytes = sum(part.nbytes for a in fetched.values() for part in a.parts.values())
                nbytes += self._host_bytes if number == 1 else 0
                # From now on the training program may delete the original arrays.
                self._on_host(number, len(self._batches), nbytes)
                stored = fetched if number > 1 else self._announced_links() | fetched
                writing = await write(
                    [
                        dataclasses.replace(
                            by_path[names.component_and_rest(name)], value=self._placed(name, array)
                        )
                        for name, array in stored.items()
                    ]
                )
                digesting = asyncio.to_thread(self._take, fetched, taken)
                for error in await asyncio.gather(writing, digesting, return_exceptions=True):
                    if error is not None:
                        raise error
                # Releases this batch before the next one is fetched. JAX frees memory that numpy
                # has viewed only when Python collects garbage.
                del fetched, stored, writing, digesting
                gc.collect(0)
            for place in self._device_places:
                place.require_complete()
        except BaseException as error:
            was_cancelled = isinstance(error, asyncio.CancelledError)
            known = concurrent.futures.CancelledError() if was_cancelled else error
            # ``on_devices`` has its result if the error came after the last digest.
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                self.on_devices.set_exception(known)
            raise

    def cancel(self) -> None:
        """Stops the save before its next batch; called if the save fails or Orbax gives it up."""
        self._is_over = True
        self.on_devices.cancel()

    def _started(self, batch: Iterable[str]) -> dict[str, _Fetch]:
        """Starts to copy a batch to the host."""
        return {name: _start(self._device[name]) for name in batch}

    def _announced_links(self) -> dict[str, HostArray]:
        """Returns the arrays whose databases are linked. They are not fetched."""
        return {name: to_announce(array) for name, array in self._linked.items()}

    def _placed(self, name: str, array: HostArray) -> HostArray:
        if (place := self._places.get(name)) is None:
            return array
        content = (array.shape, array.dtype, array.sharding, array.parts)
        return PlacedArray(*content, place)

    def _take(self, fetched: Mapping[str, HostArray], taken: dict[str, Digests]) -> None:
        """Computes a batch's digests; after the last batch, completes the future ``on_devices``."""
        for name, array in fetched.items():
            taken[name] = self._digests(name, array, array.parts)
        if len(taken) == len(self._device):
            self.on_devices.set_result(taken)

    def _digests(self, name: str, array: AnyArray, parts: Mapping[Start, np.ndarray]) -> Digests:
        if array.dtype == np.bool_ and any((p.view(np.uint8) > 1).any() for p in parts.values()):
            raise SaveError(
                f"{name}: expected booleans whose bytes are 0 or 1, found other bytes, which "
                "storage does not preserve; compute the array again, for example as x != 0",
                key_path=name,
            )
        is_stack, with_long = name in self._stacks, name in self._places
        return block_digests.take(array, parts, is_stack=is_stack, with_long=with_long)


def announced(array: AnyArray, place: Place | None) -> HostArray | np.ndarray:
    """Returns a host array itself, and for another array its shape, dtype and sharding.

    A host array that ``place`` stores says so.
    """
    if not isinstance(array, np.ndarray):
        return to_announce(array)
    return array if place is None else placed_on_host(array, place)


def to_announce(array: jax.Array | HostArray) -> HostArray:
    """Returns an array without parts, which has the shape, dtype and sharding of ``array``."""
    return HostArray(tuple(array.shape), array.dtype, array.sharding, {})


def fetched(array: jax.Array | HostArray) -> HostArray:
    """Fetches an array: returns the parts that this process stores."""
    return _start(array)()


def fetched_shards(array: jax.Array | HostArray) -> HostArray:
    """Fetches an array: returns the shards on devices of this process."""
    if isinstance(array, HostArray):
        return array
    shards = shards_of(unshared(array))
    parts = {start_of(shard.index): np.asarray(shard.data) for shard in shards}
    return HostArray(tuple(array.shape), array.dtype, array.sharding, parts)


def _start(array: jax.Array | HostArray) -> _Fetch:
    """Starts to copy the parts of an array that this process stores to the host."""
    if isinstance(array, HostArray):
        return lambda: _stored(array)
    # JAX would keep the host's copy beside the original array.
    shards = {shard.device: shard.data for shard in shards_of(unshared(array))}
    is_on_host = array.sharding.memory_kind in HOST_MEMORY
    parts: list[tuple[Start, jax.Array, tuple[slice, ...] | None]] = []
    for start, device, within in chunking.stored_parts(array):
        part = shards[device]
        # A program that cuts a small array in memory of the host might hang: Orbax avoids that too.
        if within is not None and not is_on_host:
            part, within = sliced(part, within), None
        part.copy_to_host_async()
        parts.append((start, part, within))

    def fetch() -> HostArray:
        found = {}
        for start, part, within in parts:
            host = np.asarray(part)
            found[start] = host if within is None else host[within]
        return HostArray(tuple(array.shape), array.dtype, array.sharding, found)

    return fetch


def _stored(array: HostArray) -> HostArray:
    """Returns the array with the parts that this process stores, cut from its shards."""
    index_of = array.sharding.addressable_devices_indices_map(array.shape)
    parts = {}
    for start, device, within in chunking.stored_parts(array):
        shard = array.parts[start_of(index_of[device])]
        parts[start] = shard if within is None else shard[within]
    return dataclasses.replace(array, parts=parts)


def _cut(arrays: Mapping[str, jax.Array | HostArray], max_bytes: int | None) -> Iterator[list[str]]:
    """Divides arrays into batches of at most ``max_bytes``; yields the names in each batch.

    Arrays that are on the host already do not count.
    """
    if max_bytes is None:
        if arrays:
            yield [*arrays]
        return
    batch: list[str] = []
    nbytes = 0
    for name, array in arrays.items():
        array_bytes = 0 if isinstance(array, HostArray) else chunking.num_stored_bytes(array)
        if batch and nbytes + array_bytes > max_bytes:
            yield batch
            batch, nbytes = [], 0
        batch.append(name)
        nbytes += array_bytes
    if batch:
        yield batch


class _Writing:
    """The awaitable that Orbax receives from ``Batches.writing``.

    Orbax awaits this object to write the arrays. If Orbax gives up the save, it cancels what it
    finds in ``commit_futures``: the ``Batches``.
    """

    def __init__(self, batches: Batches, params: Sequence[Any], write: _Write) -> None:
        self._batches, self._params, self._write = batches, params, write
        self.commit_futures = [batches]

    def __await__(self) -> Generator[Any, None, None]:
        return self._batches.write(self._params, self._write).__await__()
