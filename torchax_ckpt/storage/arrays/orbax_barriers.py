"""Owns how Orbax's processes wait for each other while they write: in a round of ours.

Left alone, Orbax compares the directory's name with a collective on the devices, which from a
background thread would cross those of the training step. Its barriers end after five minutes, know
nothing of a process that has failed, and name nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import jax
from orbax.checkpoint._src.futures import synchronization
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint._src.serialization import jax_array_handlers, type_handlers
from orbax.checkpoint.experimental.v1._src.saving import execution
from orbax.checkpoint.experimental.v1._src.synchronization import multihost

from torchax_ckpt.processes.coordination import ALONE, Processes

one_at_a_time = threading.RLock()
"""Held while Orbax begins to save, and while it loads, by every checkpointer of this process.

Orbax numbers its operations per process, and the parts of a save find each other under the newest
number, until it has begun: another that begins meanwhile makes it fail, or hang. Once begun it
keeps its number, so that a slow save to a bucket holds up no save to a local tier.
"""

_numbers = itertools.count(1)
# Operation of Orbax's -> those that carry it out.
_under_way: dict[str, Processes] = {}
_barrier = multihost.sync_global_processes
_multihost = type_handlers.multihost
_COUNTING = (type_handlers, array_metadata_store)


@contextlib.contextmanager
def one_order(processes: Processes) -> Iterator[None]:
    """Holds ``one_at_a_time``, on every process for the same save or load; in a round."""
    if not processes.is_first:
        processes.share()  # comes once process 0 holds it
    with one_at_a_time:
        if processes.is_first:
            processes.share()
        yield


@contextlib.contextmanager
def beginning(processes: Processes = ALONE) -> Iterator[contextlib.ExitStack]:
    """Within it Orbax begins an operation, whose barriers are meetings of these processes.

    There are none when there is one process. Enter it where nothing else of Orbax's begins.

    Yields:
      A context to be left once the operation has ended.
    """
    ending = contextlib.ExitStack()
    if jax.process_count() == 1 and processes.count == 1:
        yield ending
        return
    # Orbax has its processes find each other's messages under the number of an operation, which
    # each counts for itself. What one does alone must not be taken for what another does.
    number = str(processes.first(lambda: next(_numbers)))
    is_alone = processes.count == 1
    if is_alone:
        processes, number = ALONE, f"{jax.process_index()}-alone-{number}"
    generator = synchronization.OperationIdGenerator
    counter, compare = generator._operation_id_counter, execution._check_directory_consistency
    generator._operation_id_counter = iter([number])
    execution._check_directory_consistency = lambda directory: None
    multihost.sync_global_processes = _meet
    _under_way[number] = processes
    ending.callback(_ended, number)
    if is_alone:
        # Orbax takes host arrays of process 0 only, and counts whose metadata there is. What is
        # done together meanwhile has host arrays on process 0 only, and metadata of all.
        for module in _COUNTING:
            module.multihost = _AsIfAlone(_multihost)
        # Where it sees several processes, it refuses arrays of one, of which there are none in what
        # is done together.
        jax_array_handlers.jax = _AsIfAlone(jax)
    try:
        yield ending
    except BaseException:
        ending.close()
        raise
    finally:
        generator._operation_id_counter = counter
        execution._check_directory_consistency = compare


def _ended(number: str) -> None:
    del _under_way[number]
    if ALONE not in _under_way.values():
        for module in _COUNTING:
            module.multihost = _multihost
        jax_array_handlers.jax = jax


class _AsIfAlone:
    """A module, as it is in a program of one process."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def process_count(self) -> int:
        """One."""
        return 1

    def process_index(self) -> int:
        """The first."""
        return 0


async def _meet(key: str, *, operation_id: str, **settings: Any) -> None:
    """Takes the place of Orbax's barrier, for its operations that are ours."""
    number = operation_id.partition(".")[0]
    if number in _under_way:
        # On threads of Orbax's, while the save's own thread speaks to the same processes.
        await asyncio.to_thread(_under_way[number].meet, key)
    else:
        await _barrier(key, operation_id=operation_id, **settings)
