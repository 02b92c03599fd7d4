"""Owns how Orbax's processes wait for each other while they write: in a round of ours.

Left alone, Orbax compares the directory's name with a collective on the devices, which from a
background thread would cross those of the training step. Its barriers end after five minutes, know
nothing of a process that has failed, and name nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from orbax.checkpoint._src.futures import synchronization
from orbax.checkpoint.experimental.v1._src.saving import execution
from orbax.checkpoint.experimental.v1._src.synchronization import multihost

from torchax_ckpt.storage.processes import ALONE, Processes


@contextlib.contextmanager
def of_orbax(processes: Processes = ALONE) -> Iterator[None]:
    """Within it Orbax's barriers are meetings of these processes, and none when there is one.

    Holds for the whole process: enter it where nothing else of Orbax's runs.
    """
    if processes.count > 1:
        # Orbax has its processes find each other's messages under the number of an operation,
        # which each counts for itself.
        number = processes.first(synchronization.OperationIdGenerator.next_operation_id)
        synchronization.OperationIdGenerator._operation_id_counter = itertools.count(number + 1)

    async def meet(key: str, **_: Any) -> None:
        # On threads of Orbax's, while the save's own thread speaks to the same processes.
        await asyncio.to_thread(processes.meet, key)

    barrier, compare = multihost.sync_global_processes, execution._check_directory_consistency
    multihost.sync_global_processes = meet
    execution._check_directory_consistency = lambda directory: None
    try:
        yield
    finally:
        multihost.sync_global_processes = barrier
        execution._check_directory_consistency = compare
