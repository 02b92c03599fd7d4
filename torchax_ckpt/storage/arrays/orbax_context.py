"""How Orbax is set up here, and how its processes wait for each other: in a round of ours."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from etils import epath
from orbax import checkpoint as v0
from orbax.checkpoint import v1 as ocp

from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.processes.coordination import SINGLE_PROCESS, Processes
from torchax_ckpt.storage.arrays import chunking, host_batches, orbax_internals
from torchax_ckpt.storage.directory import commit_record
from torchax_ckpt.storage.directory.committed_step import MANIFEST, STATE, SUMMARY
from torchax_ckpt.storage.medium import location

# Several files are written, synced and read at a time; Orbax's default, 2 GB, is mostly one.
_DATA_FILE_BYTES = 64 << 20
# How Orbax names what it will rename to commit it.
_TMP_SUFFIX = ".orbax-checkpoint-tmp"


def _storage_options(_: Any, leaf: Any) -> Any:
    return ocp.options.ArrayOptions.Saving.StorageOptions(
        chunk_byte_size=chunking.chunk_limit(leaf)
    )


@orbax_internals.recorded_as(ocp.handlers.JsonHandler)
class _LaterJson(ocp.handlers.JsonHandler):
    """Writes JSON that becomes known while the other items of a step are being written."""

    async def save(
        self, directory: Any, checkpointable: concurrent.futures.Future[dict[str, Any]]
    ) -> Any:
        return self._write(directory, checkpointable)

    async def _write(
        self, directory: Any, later: concurrent.futures.Future[dict[str, Any]]
    ) -> None:
        content = await asyncio.to_thread(later.result)
        await (await super().save(directory, content))

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, concurrent.futures.Future)


class _FencedPath(type(epath.Path("/"))):  # type: ignore[misc]
    """A path of Orbax's that seals its step, and looks at its fence, with the commit mark.

    On a bucket it does not delete the file that Orbax is about to write, which writing replaces in
    any case: if the answer is slow to come, such a delete is sent again, and the first one may be
    carried out after the write, and even after the step was reported durable.

    The fences lie outside, as Orbax keeps paths in caches.
    """

    fences: ClassVar[dict[str, Callable[[], None]]] = {}

    def unlink(self, *args: Any, **kwargs: Any) -> None:
        if not location.is_bucket(self):
            super().unlink(*args, **kwargs)

    def write_text(self, data: str, *args: Any, **kwargs: Any) -> int:
        if self.name == commit_record.MARK:
            data = commit_record.sealing(self.parent, data)
            self.fences[str(self.parent).partition(_TMP_SUFFIX)[0]]()
        return super().write_text(data, *args, **kwargs)


@contextlib.contextmanager
def for_loading(options: CheckpointOptions) -> Iterator[None]:
    """Within it Orbax loads, with the memory bounds of the options."""
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    context.memory.read_concurrent_bytes = options.max_host_bytes
    with context:
        yield


@contextlib.contextmanager
def for_saving(
    path: epath.Path,
    arrays: Mapping[str, jax.Array | np.ndarray],
    coming: host_batches.Batches,
    folder_mode: int | None,
    before_commit: Callable[[], None],
    *,
    is_compressed: bool,
    is_alone: bool,
) -> Iterator[None]:
    """Within it Orbax saves one step.

    Args:
      path: the directory of the step.
      arrays: what is saved, by stored name.
      coming: those of them that lie on devices.
      folder_mode: the permissions of new folders; None for the usual ones.
      before_commit: called right before the commit mark is written.
      is_compressed: whether arrays are compressed.
      is_alone: whether no other process takes part.
    """
    registry = ocp.handlers.local_registry(include_global_registry=False)
    registry.add(ocp.handlers.JsonHandler, checkpointable_name=SUMMARY)
    registry.add(_LaterJson, checkpointable_name=MANIFEST)
    registry.add(orbax_internals.PyTreeInBatches, checkpointable_name=STATE)
    context = ocp.Context()
    context.checkpointables.registry = registry
    # Where folders are made in the background and that fails, Orbax's other threads wait for them
    # for minutes, and the program cannot end. Nor would batches know what to wait for: they are
    # begun when Orbax's newest operation may be another.
    context.async_options.create_directories_asynchronously = False
    context.file.path_class = _FencedPath
    context.file.path_permission_mode = folder_mode
    saving = context.array.saving
    saving.use_compression = is_compressed
    # Orbax cuts no chunk larger than this.
    saving.ocdbt_target_data_file_size = max(
        [_DATA_FILE_BYTES, *map(chunking.chunk_limit, arrays.values())]
    )
    saving.scoped_storage_options_creator = _storage_options
    # What cutting goes by; left alone, both depend on the platform.
    saving.use_replica_parallel = not is_alone
    # Would not leave what it fetches where digests find it.
    saving.enable_pinned_host_transfer = False
    # Version 3 would put a shard's chunks and their index into one value: one more copy of
    # every byte, a seventh of the time of a save.
    saving.use_zarr3 = False
    context.memory.serialization_status_callback = coming
    # Host leaves are copies already, made when the state was captured.
    context.memory.deepcopy_host_arrays = False
    if is_alone:
        context.multiprocessing.primary_host = jax.process_index()
        context.multiprocessing.active_processes = {jax.process_index()}
    _FencedPath.fences[str(path)] = before_commit
    try:
        with context:
            yield
    finally:
        del _FencedPath.fences[str(path)]


# --- operations ----------------------------------------------------------------------------------

one_at_a_time = threading.RLock()
"""Held while Orbax begins to save, and while it loads, by every checkpointer of this process.

Once begun, a save does without: a slow save to a bucket holds up no save to a local tier.
"""

_numbers = itertools.count(1)


def coordination_service() -> Any:
    """JAX's coordination service, through which processes speak; None where there is only one."""
    return v0.multihost.get_jax_distributed_client() if jax.process_count() > 1 else None


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
def operation(processes: Processes = SINGLE_PROCESS) -> Iterator[None]:
    """Within it this thread has Orbax save or load once; its barriers are meetings in the round.

    Leave it once Orbax has ended, also what it does in the background.
    """
    # Orbax has its processes find each other's messages under the number of an operation, which
    # each counts for itself. What one does alone must not be taken for what another does, nor for
    # what the program has Orbax do.
    number = f"torchax_ckpt-{processes.first(lambda: next(_numbers))}"
    is_alone = processes.count == 1
    if is_alone:
        processes, number = SINGLE_PROCESS, f"{number}-of-process-{jax.process_index()}"
    with orbax_internals.operation(number, processes.meet, is_alone=is_alone):
        yield
