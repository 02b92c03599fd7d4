"""Owns the way of a step's device arrays through the host: fetched once, digested, written, let go.

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
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.serialization.types import DefaultSerializationStatusCallback
from orbax.checkpoint.experimental.v1._src.serialization import registry
from orbax.checkpoint.experimental.v1._src.serialization.array_leaf_handler import ArrayLeafHandler

from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Digests
from torchax_ckpt.sharding import shards_of, unshared
from torchax_ckpt.storage import digests

_Write = Callable[[Sequence[Any]], Awaitable[Awaitable[None]]]


class Batches(DefaultSerializationStatusCallback):
    """The arrays of one save, and their digests.

    Orbax takes it along, as the callback of a save, to the handler of device arrays below. Host
    arrays it writes by itself.

    Args:
      arrays: stored name -> array.
      stacks: which of them are stacks.
      max_bytes: how much of the device arrays is a batch, unless one is larger; None for all.
      on_host: called once a batch is on the host, on whichever thread: with its number, from 1 on,
        with how many there are, and with its bytes. Host arrays count to the first one.
    """

    def __init__(
        self,
        arrays: Mapping[str, jax.Array | np.ndarray],
        stacks: Collection[str],
        max_bytes: int | None,
        on_host: Callable[[int, int, int], None],
    ) -> None:
        self._host = {n: array for n, array in arrays.items() if not isinstance(array, jax.Array)}
        self._names = {
            names.component_and_rest(name): name for name in arrays if name not in self._host
        }
        for name in self._names.values():
            shards_of(arrays[name])  # type: ignore[arg-type]  # before Orbax does on its threads
        self._host_bytes = sum(array.nbytes for array in self._host.values())
        self._stacks = stacks
        self._max_bytes = max_bytes
        self._on_host = on_host
        self._taken: concurrent.futures.Future[dict[str, Digests]] = concurrent.futures.Future()
        if not self._names:  # then Orbax asks for nothing
            self._on_host(1, 1, self._host_bytes)
            self._taken.set_result({})

    def taken(self) -> dict[str, Digests]:
        """The digests of what this process stores; waits for the last batch to be on the host.

        Raises:
          concurrent.futures.CancelledError: Orbax gave up.
          Exception: what went wrong with a batch.
        """
        own = {n: self._digests(n, a, digests.shards(a)) for n, a in self._host.items()}
        return own | self._taken.result()

    async def write(self, params: Sequence[Any], write: _Write) -> None:
        """Writes all device arrays.

        Args:
          params: what Orbax's handler of arrays is given, each with an array and its path.
          write: that handler's way to fetch arrays, and then to write them.
        """
        if not self._taken.set_running_or_notify_cancel():
            return
        taken: dict[str, Digests] = {}
        try:
            batches = [*self._cut(params)]
            for number, batch in enumerate(batches, 1):
                own = [dataclasses.replace(param, value=unshared(param.value)) for param in batch]
                writing = await write(own)
                hosts = [(param, [*digests.shards(param.value)]) for param in own]
                nbytes = sum(host.nbytes for _, parts in hosts for _, host in parts)
                nbytes += self._host_bytes if number == 1 else 0
                self._on_host(number, len(batches), nbytes)  # then the originals may be donated
                await asyncio.gather(writing, asyncio.to_thread(self._take, hosts, taken))
                # Before more is fetched. JAX frees what numpy has looked at when Python collects.
                del own, writing, hosts
                gc.collect(0)
        except BaseException as error:
            was_cancelled = isinstance(error, asyncio.CancelledError)
            known = concurrent.futures.CancelledError() if was_cancelled else error
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # all were taken
                self._taken.set_exception(known)
            raise

    def cancel(self) -> bool:
        """Orbax gives up, perhaps before it begins."""
        return self._taken.cancel()

    def _take(
        self, hosts: Sequence[tuple[Any, Sequence[digests.Part]]], taken: dict[str, Digests]
    ) -> None:
        for param, parts in hosts:
            name = self._names[tuple(key.key for key in param.keypath)]
            taken[name] = self._digests(name, param.value, parts)
        if len(taken) == len(self._names):
            self._taken.set_result(taken)

    def _digests(
        self, name: str, array: jax.Array | np.ndarray, parts: Iterable[digests.Part]
    ) -> Digests:
        return digests.take(array, parts, is_stack=name in self._stacks)

    def _cut(self, params: Sequence[Any]) -> Iterator[Sequence[Any]]:
        if self._max_bytes is None:
            yield params
            return
        batch: list[Any] = []
        nbytes = 0
        for param in params:
            own = digests.num_own_bytes(param.value)
            if batch and nbytes + own > self._max_bytes:
                yield batch
                batch, nbytes = [], 0
            batch.append(param)
            nbytes += own
        yield batch


class _Arrays(ArrayLeafHandler):
    """Orbax's handler of arrays, given one batch after the other."""

    async def serialize(self, params: Sequence[Any], context: Any) -> _Writing:
        async def write(batch: Sequence[Any]) -> Awaitable[None]:
            return await super(_Arrays, self).serialize(batch, context)

        return _Writing(self._context.memory.serialization_status_callback, params, write)


class _Writing:
    """What Orbax awaits, perhaps; and cancels where it gives up."""

    def __init__(self, batches: Batches, params: Sequence[Any], write: _Write) -> None:
        self._batches, self._params, self._write = batches, params, write
        self.commit_futures = [batches]

    def __await__(self) -> Generator[Any, None, None]:
        return self._batches.write(self._params, self._write).__await__()


class PyTreeInBatches(ocp.handlers.PyTreeHandler):
    """Orbax's handler of pytrees, with arrays written batch by batch."""

    def __init__(self, *, context: ocp.Context | None = None) -> None:
        leaves = registry.BaseLeafHandlerRegistry()
        for (
            leaf,
            abstract,
            typestrs,
            handler,
        ) in registry.STANDARD_TYPE_AND_ABSTRACT_TYPE_AND_TYPESTR_TO_HANDLER:
            chosen = _Arrays if leaf is jax.Array else handler
            leaves.add(leaf, abstract, chosen, secondary_typestrs=typestrs)
        super().__init__(context=context, leaf_handler_registry=leaves)


# By this name Orbax notes in each step how the item is to be read: as any pytree.
PyTreeInBatches.__module__ = ocp.handlers.PyTreeHandler.__module__
PyTreeInBatches.__qualname__ = ocp.handlers.PyTreeHandler.__qualname__
