"""Configures Orbax for the save of a step: handlers, the fence before the commit, options."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from torchax_ckpt.options import Codec
from torchax_ckpt.storage.arrays import chunking, compression, orbax_internals
from torchax_ckpt.storage.directory import commit_record
from torchax_ckpt.storage.directory.committed_step import ASSETS, MANIFEST, STATE, SUMMARY
from torchax_ckpt.storage.medium import location

# With this size several files are written, synced and read at the same time. With Orbax's default,
# 2 GB, there is mostly one file.
_DATA_FILE_BYTES = 64 << 20
# Orbax's suffix for the directory that it renames in order to commit it.
_TMP_SUFFIX = ".orbax-checkpoint-tmp"


def _storage_options(_: Any, leaf: Any) -> Any:
    return ocp.options.ArrayOptions.Saving.StorageOptions(
        chunk_byte_size=chunking.chunk_limit(leaf)
    )


@orbax_internals.recorded_as(ocp.handlers.JsonHandler)
class _LaterJson(ocp.handlers.JsonHandler):
    """Writes a JSON item whose content becomes known while Orbax writes the step's other items."""

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


@orbax_internals.recorded_as(ocp.handlers.JsonHandler)
class _EncodedJson(ocp.handlers.JsonHandler):
    """Writes a JSON item that is encoded already; writes no file for an item without content.

    The assets of a step may have tens of megabytes. Encoding them would hold the interpreter lock,
    which the training thread needs, during each save.
    """

    async def save(self, directory: Any, checkpointable: bytes) -> Any:
        return self._write(directory, checkpointable)

    async def _write(self, directory: Any, content: bytes) -> None:
        folder = await directory.await_creation()
        if content:
            await asyncio.to_thread((folder / "data.json").write_bytes, content)

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, bytes)


class _FencedPath(type(epath.Path("/"))):  # type: ignore[misc]
    """A path for Orbax that checks a step's fence before Orbax writes the step's commit mark.

    A fence is a function that raises if the step must not be committed, given the step's folder,
    which on a file system has a temporary name. The path also adds the digests of Orbax's metadata
    files to the text of the mark (``commit_record.sealing``).

    On a bucket the path ignores Orbax's request to delete a file before Orbax writes it; the write
    replaces the file in any case. If the server answers a delete slowly, the client sends the
    delete again. The server may then carry out the first delete after the write, and even after the
    step was reported durable.

    The dict ``fences`` (path of a step -> fence) is an attribute of the class. A path object cannot
    hold the fence itself, because Orbax caches path objects.
    """

    fences: ClassVar[dict[str, Callable[[epath.Path], None]]] = {}

    def unlink(self, *args: Any, **kwargs: Any) -> None:
        if not location.is_bucket(self):
            super().unlink(*args, **kwargs)

    def write_text(self, data: str, *args: Any, **kwargs: Any) -> int:
        if self.name == commit_record.MARK:
            data = commit_record.sealing(self.parent, data)
            self.fences[str(self.parent).partition(_TMP_SUFFIX)[0]](self.parent)
        return super().write_text(data, *args, **kwargs)


@contextlib.contextmanager
def for_saving(
    path: epath.Path,
    arrays: Mapping[str, chunking.AnyArray],
    coming: orbax_internals.StatusCallback,
    folder_mode: int | None,
    before_commit: Callable[[epath.Path], None],
    *,
    codec: Codec | None,
    is_alone: bool,
) -> Iterator[None]:
    """Configures Orbax, within this context, for the save of one step."""
    registry = ocp.handlers.local_registry(include_global_registry=False)
    registry.add(ocp.handlers.JsonHandler, checkpointable_name=SUMMARY)
    registry.add(_LaterJson, checkpointable_name=MANIFEST)
    registry.add(_EncodedJson, checkpointable_name=ASSETS)
    registry.add(orbax_internals.PyTreeInBatches, checkpointable_name=STATE)
    context = ocp.Context()
    context.checkpointables.registry = registry
    # If Orbax creates folders in the background and fails, its other threads wait for the folders
    # for minutes, and the program cannot end. The batches also would not know which operation to
    # wait for: when the batches begin, Orbax's newest operation may be another one.
    context.async_options.create_directories_asynchronously = False
    context.file.path_class = _FencedPath
    context.file.path_permission_mode = folder_mode
    saving = context.array.saving
    # Orbax passes this through to the function that ``orbax_internals`` replaces.
    saving.use_compression = codec and functools.partial(compression.zarr_compressor, codec)
    # Orbax cuts no chunk larger than this size, so the size must cover the largest limit.
    saving.ocdbt_target_data_file_size = max(
        [_DATA_FILE_BYTES, *map(chunking.chunk_limit, arrays.values())]
    )
    saving.scoped_storage_options_creator = _storage_options
    # The cutting of chunks depends on this option. The defaults of this option and the next one
    # depend on the platform.
    saving.use_replica_parallel = not is_alone
    # Zarr version 3 would join a shard's chunks and their index to one value. The join copies each
    # byte once more, and takes a seventh of the time of a save.
    saving.use_zarr3 = False
    context.memory.serialization_status_callback = coming
    # Host leaves were copied already, when the state was captured.
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
