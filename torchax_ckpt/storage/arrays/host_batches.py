"""The way of a step's device arrays through the host: fetched, digested, written, let go.

They go in batches, of which one is on the host at a time. What is fetched from a device JAX keeps
beside the array that was asked, for as long as that is held, and Orbax holds all arrays of a step
until it is written. So a batch is fetched through arrays made for it alone, whose buffers are those
of the originals.
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

from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Digests
from torchax_ckpt.snapshot.sharding import shards_of, unshared
from torchax_ckpt.storage.arrays import block_digests, chunking, orbax_internals

_Write = Callable[[Sequence[Any]], Awaitable[Awaitable[None]]]


class Batches(orbax_internals.StatusCallback):
    """The arrays of one save, and their digests.

    Orbax takes it along, as the callback of a save, to the handler of device arrays
    (``orbax_internals.PyTreeInBatches``). Host arrays it writes by itself.

    Args:
      arrays: stored name -> array.
      stacks: which of them are stacks.
      max_bytes: how much of the device arrays is a batch, unless one is larger; None for all.
      on_host: called once a batch is on the host, on whichever thread: with its number, from 1 on,
        with how many there are, and with its bytes. Host arrays count to the first one.

    Attributes:
      on_devices: the digests of the device arrays, once the last batch has been digested; what went
        wrong with one; cancelled if Orbax gives up.
    """

    def __init__(
        self,
        arrays: Mapping[str, jax.Array | np.ndarray],
        stacks: Collection[str],
        max_bytes: int | None,
        on_host: Callable[[int, int, int], None],
    ) -> None:
        self._device = {n: array for n, array in arrays.items() if isinstance(array, jax.Array)}
        self._host = {n: array for n, array in arrays.items() if not isinstance(array, jax.Array)}
        self._stacks = stacks
        self._on_host = on_host
        self._is_over = False
        self.on_devices: concurrent.futures.Future[dict[str, Digests]] = concurrent.futures.Future()
        for array in self._device.values():
            shards_of(array)  # before Orbax does on its threads
        self._batches = [*_cut(self._device, max_bytes)]
        # These come while Orbax gets ready.
        self._first = self._started(self._batches[0]) if self._batches else {}
        self._host_bytes = sum(array.nbytes for array in self._host.values())
        if not self._device:  # then Orbax asks for nothing
            self._on_host(1, 1, self._host_bytes)
            self.on_devices.set_result({})

    def taken(self) -> dict[str, Digests]:
        """The digests of what this process stores, once ``on_devices`` are there."""
        own = {n: self._digests(n, a, block_digests.shards(a)) for n, a in self._host.items()}
        return own | self.on_devices.result()

    def writing(self, params: Sequence[Any], write: _Write) -> _Writing:
        """What begins to write all device arrays once it is awaited; args as for ``write``."""
        return _Writing(self, params, write)

    async def write(self, params: Sequence[Any], write: _Write) -> None:
        """Writes all device arrays.

        Args:
          params: what Orbax's handler of arrays is given, each with an array and its path.
          write: that handler's way to fetch arrays, and then to write them.
        """
        if not self.on_devices.set_running_or_notify_cancel():
            return
        taken: dict[str, Digests] = {}
        try:
            by_path = {tuple(key.key for key in param.keypath): param for param in params}
            for number, batch in enumerate(self._batches, 1):
                if self._is_over:
                    raise asyncio.CancelledError
                own, self._first = self._first or self._started(batch), {}
                writing = await write(
                    [
                        dataclasses.replace(by_path[names.component_and_rest(name)], value=array)
                        for name, array in own.items()
                    ]
                )
                hosts = {name: [*block_digests.shards(array)] for name, array in own.items()}
                nbytes = sum(host.nbytes for parts in hosts.values() for _, host in parts)
                nbytes += self._host_bytes if number == 1 else 0
                # From now on the originals may be deleted.
                self._on_host(number, len(self._batches), nbytes)
                digesting = asyncio.to_thread(self._take, own, hosts, taken)
                for error in await asyncio.gather(writing, digesting, return_exceptions=True):
                    if error is not None:
                        raise error
                # Before more is fetched. JAX frees what numpy has looked at when Python collects.
                del own, writing, digesting, hosts
                gc.collect(0)
        except BaseException as error:
            was_cancelled = isinstance(error, asyncio.CancelledError)
            known = concurrent.futures.CancelledError() if was_cancelled else error
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # all were taken
                self.on_devices.set_exception(known)
            raise

    def cancel(self) -> None:
        """Ends it before the next batch: Orbax gives up, perhaps at once, or the save failed."""
        self._is_over = True
        self.on_devices.cancel()

    def _started(self, batch: Iterable[str]) -> dict[str, jax.Array]:
        """The arrays of a batch as ones of their own, on their way to the host."""
        own = {name: unshared(self._device[name]) for name in batch}
        for array in own.values():
            for shard in shards_of(array):
                if shard.replica_id == 0 and not chunking.is_shared(array):
                    shard.data.copy_to_host_async()
        return own

    def _take(
        self,
        own: Mapping[str, jax.Array],
        hosts: Mapping[str, Sequence[block_digests.Part]],
        taken: dict[str, Digests],
    ) -> None:
        for name, parts in hosts.items():
            taken[name] = self._digests(name, own[name], parts)
        if len(taken) == len(self._device):
            self.on_devices.set_result(taken)

    def _digests(
        self, name: str, array: jax.Array | np.ndarray, parts: Iterable[block_digests.Part]
    ) -> Digests:
        return block_digests.take(array, parts, is_stack=name in self._stacks)


def _cut(arrays: Mapping[str, jax.Array], max_bytes: int | None) -> Iterator[list[str]]:
    if max_bytes is None:
        if arrays:
            yield [*arrays]
        return
    batch: list[str] = []
    nbytes = 0
    for name, array in arrays.items():
        own = block_digests.num_host_bytes(array)
        if batch and nbytes + own > max_bytes:
            yield batch
            batch, nbytes = [], 0
        batch.append(name)
        nbytes += own
    if batch:
        yield batch


class _Writing:
    """What Orbax awaits, perhaps; and cancels where it gives up."""

    def __init__(self, batches: Batches, params: Sequence[Any], write: _Write) -> None:
        self._batches, self._params, self._write = batches, params, write
        self.commit_futures = [batches]

    def __await__(self) -> Generator[Any, None, None]:
        return self._batches.write(self._params, self._write).__await__()
