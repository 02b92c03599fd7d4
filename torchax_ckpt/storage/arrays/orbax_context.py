"""Sets up Orbax for one save or load.

Where Orbax would wait for other processes at its own barrier, the processes wait for each other
through ``Processes``, the library's own channel between the processes of a run.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import jax
from orbax import checkpoint as v0
from orbax.checkpoint import v1 as ocp

from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.processes.coordination import SINGLE_PROCESS, Processes

one_at_a_time = threading.RLock()
"""The lock that each checkpointer of this process holds while Orbax begins a save, or loads.

A checkpointer releases the lock as soon as its save has begun, so a slow save to a bucket does not
delay a save to a local tier.
"""

_numbers = itertools.count(1)


@contextlib.contextmanager
def for_loading(options: CheckpointOptions) -> Iterator[None]:
    """Applies the memory bounds of ``options`` to Orbax's loads within this context."""
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    context.memory.read_concurrent_bytes = options.max_host_bytes
    with context:
        yield


def coordination_service() -> Any:
    """Returns the client of JAX's coordination service, through which processes communicate.

    Returns None if there is only one process.
    """
    return v0.multihost.get_jax_distributed_client() if jax.process_count() > 1 else None


@contextlib.contextmanager
def one_order(processes: Processes) -> Iterator[None]:
    """Holds the lock ``one_at_a_time`` while this process saves or loads.

    If several checkpointers save or load at the same time, each process lets them take the lock in
    the order in which they take it on process 0. Enter this context within ``processes.round``.
    """
    if not processes.is_first:
        processes.share()  # returns once process 0 holds the lock
    with one_at_a_time:
        if processes.is_first:
            processes.share()
        yield


@contextlib.contextmanager
def operation(processes: Processes = SINGLE_PROCESS) -> Iterator[None]:
    """Makes Orbax treat all calls of this thread within this context as one save or load.

    Wherever Orbax would wait at its own barrier, the processes wait for each other with
    ``processes.meet``. Enter this context within ``processes.round``. Leave the context only after
    Orbax has ended all work of the save or load, including background work.
    """
    from torchax_ckpt.storage.arrays import orbax_internals  # which not every Orbax has

    # Orbax's processes find each other's messages by the number of the operation, which each
    # process counts for itself. An operation that one process carries out alone must not be
    # confused with an operation of another process, nor with one that the program itself starts.
    if is_alone := processes.count == 1:
        processes = SINGLE_PROCESS
        name = f"torchax_ckpt-{next(_numbers)}-of-process-{jax.process_index()}"
    else:
        name = processes.common_name()
    with orbax_internals.operation(name, processes.meet, is_alone=is_alone):
        yield
