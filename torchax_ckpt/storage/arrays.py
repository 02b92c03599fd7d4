"""Owns the content of a step: written, described and read through Orbax."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from etils import epath
from jax.sharding import Sharding
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.serialization import tensorstore_utils

from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DirectoryError,
    ForeignCheckpointError,
    SaveError,
)
from torchax_ckpt.layout import names
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.storage import (
    commits,
    cutting,
    digests,
    inspection,
    location,
    medium,
    modes,
    rendezvous,
    syncing,
)
from torchax_ckpt.storage.commits import MANIFEST, SUMMARY
from torchax_ckpt.storage.directory import CommittedStep
from torchax_ckpt.storage.inspection import STATE
from torchax_ckpt.storage.processes import ALONE, Processes

logger = logging.getLogger(__name__)

# Several files are written, synced and read at a time; Orbax's default, 2 GB, is mostly one.
_DATA_FILE_BYTES = 64 << 20
# How TensorStore names the folders of such files.
_DATA = "d"
# How Orbax names what it will rename to commit it.
_TMP_SUFFIX = ".orbax-checkpoint-tmp"
# An item needs content; a state may have no stored arrays at all.
_PLACEHOLDER = {"empty": np.zeros(1, np.uint8)}

one_at_a_time = threading.RLock()
"""Held while Orbax begins to save, and while it loads, by every checkpointer of this process.

Orbax numbers its operations per process, and the parts of a save find each other under the newest
number, until it has begun: another that begins meanwhile makes it fail, or hang. Once begun it
keeps its number, so that a slow save to a bucket holds up no save to a local tier.
"""


def write_step(
    path: epath.Path,
    arrays: Mapping[str, jax.Array | np.ndarray],
    manifest: Callable[[], Mapping[str, Any]],
    summary: Mapping[str, Any],
    options: CheckpointOptions,
    is_compressed: bool,
    *,
    before_commit: Callable[[], None] = lambda: None,
    processes: Processes = ALONE,
) -> None:
    """Writes and commits a step; returns when it is durable. Call it off the training thread.

    Every process writes what its devices hold, and process 0 the host arrays and the JSON.

    Args:
      path: the directory of the step, which must not exist.
      arrays: stored name -> array.
      manifest: gives JSON; called on this thread once all arrays are on the host, while they are
        being written.
      summary: JSON.
      options: memory bounds.
      is_compressed: whether the arrays are compressed.
      before_commit: called when everything else is written, right before the commit mark is; what
        it raises keeps the step from being committed.
      processes: those that write it together, in a round.

    Raises:
      SaveError, ValueError: readers would refuse the step; nothing is committed.
    """
    tree: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        component, rest = names.component_and_rest(name)
        tree.setdefault(component, {})[rest] = array
        _require_readable(name, array)
    later: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
    items = {STATE: tree or _PLACEHOLDER, MANIFEST: later, SUMMARY: digests.seal(summary)}
    _FencedPath.fences[str(path)] = before_commit
    try:
        with (
            modes.closed_while_written(path, opens=processes.is_first) as mode,
            _context(
                options,
                _FencedPath,
                mode,
                is_compressed=is_compressed,
                # Orbax cuts no chunk larger than this.
                data_file_bytes=max([_DATA_FILE_BYTES, *map(cutting.chunk_limit, arrays.values())]),
                is_alone=processes.count == 1,
            ),
        ):
            with one_order(processes), rendezvous.beginning(processes) as operation:
                response = ocp.save_checkpointables_async(path, items)
            with operation:
                try:
                    later.set_result(digests.seal(manifest()))
                except BaseException as error:
                    later.set_exception(error)  # which ends the save
                    with contextlib.suppress(Exception):
                        response.result()
                    raise
                response.result()
        if processes.is_first:
            syncing.sync_tree(path, but=_DATA)
    finally:
        del _FencedPath.fences[str(path)]


def _require_readable(name: str, array: jax.Array | np.ndarray) -> None:
    count = cutting.num_pieces(array.shape, cutting.chunk_shape(array))
    if count > inspection.MAX_CHUNKS:
        raise SaveError(
            f"{name}: readers take at most {inspection.MAX_CHUNKS} chunks, found {count} in "
            f"{array.dtype}{list(array.shape)}",
            key_path=name,
        )
    if array.dtype == np.bool_ and any(
        (host.view(np.uint8) > 1).any() for _, host in digests.shards(array)
    ):
        raise SaveError(
            f"{name}: expected booleans whose bytes are 0 or 1, which is all that storage gives "
            "back, found others; make them anew: x != 0",
            key_path=name,
        )


def _storage_options(_: Any, leaf: Any) -> Any:
    return ocp.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=cutting.chunk_limit(leaf))


def read_manifest(committed: CommittedStep) -> Any:
    """The manifest of a step, as JSON. Its summary is checked as well.

    Raises:
      ForeignCheckpointError: the step has none: bare Orbax wrote it.
      CorruptCheckpointError: one of them, or the record of the step's commit, cannot be read, or
        is not what was written.
    """
    if committed.has_lost_record:
        with as_corrupt(committed, "commit record"):
            commits.read_time(committed.path)
    with as_corrupt(committed, "manifest"):
        is_there = (committed.path / MANIFEST).exists()
        is_ours = is_there or {MANIFEST, SUMMARY} <= commits.item_names(committed.path)
    if not is_ours:
        raise ForeignCheckpointError(
            f"step {committed.step} in {committed.path} has no manifest: it was not written by "
            "torchax_ckpt, so its arrays cannot be matched with torch's names. Read it with "
            "load(step, abstract_state) and assign the result yourself.",
            step=committed.step,
            path=committed.path,
        )
    with as_corrupt(committed, SUMMARY):
        digests.read_sealed(committed.path / SUMMARY)
    with as_corrupt(committed, MANIFEST):
        return digests.read_sealed(committed.path / MANIFEST)


def load_foreign(committed: CommittedStep, abstract_state: Any, options: CheckpointOptions) -> Any:
    """Reads a step that bare Orbax wrote.

    Args:
      committed: the step.
      abstract_state: a pytree of ShapeDtypeStructs, or None for everything, as host arrays.
      options: memory bounds.

    Raises:
      CorruptCheckpointError: Orbax cannot read it as the abstract state asks.
    """
    metadata = foreign_metadata(committed)
    with as_corrupt(committed, "checkpoint"), one_at_a_time, _context(options):
        if abstract_state is None:
            # Without an abstract state Orbax rebuilds the mesh it was saved on, which fails on
            # any other; host arrays need none.
            abstract_state = jax.tree.map(_host_abstract, metadata)
        return ocp.load(committed.path, abstract_state)


def foreign_metadata(committed: CommittedStep) -> Any:
    """What Orbax says of a step that bare Orbax wrote: a pytree of shapes and dtypes."""
    with as_corrupt(committed, "metadata"):
        inspection.require_names_within(committed.path, committed.step)
        metadata = ocp.metadata(committed.path).metadata
        paths, _ = jax.tree_util.tree_flatten_with_path(metadata)
        inspection.require_modest(
            committed.path,
            committed.step,
            {
                jax.tree_util.keystr(path): leaf
                for path, leaf in paths
                if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
            },
        )
    return metadata


def _host_abstract(leaf: Any) -> Any:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return abstract_array(tuple(leaf.shape), leaf.dtype, None)
    return leaf


def abstract_array(
    shape: tuple[int, ...], dtype: str | np.dtype[Any], sharding: Sharding | None
) -> Any:
    """What Orbax is asked for: an array on a sharding, or a numpy array."""
    dtype = np.dtype(dtype)
    if sharding is not None:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    # Orbax reads into numpy where the abstract leaf is a numpy array; this one takes no memory.
    return np.broadcast_to(np.zeros((), dtype), shape)


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


# By this name Orbax notes in each step how the item is to be read: as any JSON.
_LaterJson.__module__ = ocp.handlers.JsonHandler.__module__
_LaterJson.__qualname__ = ocp.handlers.JsonHandler.__qualname__


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
        if self.name == commits.MARK:
            data = commits.sealing(self.parent, data)
            self.fences[str(self.parent).partition(_TMP_SUFFIX)[0]]()
        return super().write_text(data, *args, **kwargs)


@contextlib.contextmanager
def _context(
    options: CheckpointOptions,
    path_class: type[epath.Path] = epath.Path,
    folder_mode: int | None = None,
    *,
    is_compressed: bool = False,
    data_file_bytes: int = _DATA_FILE_BYTES,
    is_alone: bool = False,
) -> Iterator[None]:
    registry = ocp.handlers.local_registry()
    # A dict of JSON would otherwise be taken for a pytree of scalars.
    registry.add(ocp.handlers.JsonHandler, checkpointable_name=SUMMARY)
    registry.add(_LaterJson, checkpointable_name=MANIFEST)
    context = ocp.Context()
    context.checkpointables.registry = registry
    # Where folders are made in the background and that fails, Orbax's other threads wait for them
    # for minutes, and the program cannot end.
    context.async_options.create_directories_asynchronously = False
    context.pytree.loading.partial_load = True
    context.file.path_class = path_class
    context.file.path_permission_mode = folder_mode
    context.array.saving.use_compression = is_compressed
    context.array.saving.ocdbt_target_data_file_size = data_file_bytes
    context.array.saving.scoped_storage_options_creator = _storage_options
    # What cutting goes by; left alone, both depend on the platform.
    context.array.saving.use_replica_parallel = not is_alone
    context.array.saving.enable_pinned_host_transfer = (
        False  # would fetch what digests have fetched
    )
    # Version 3 would put a shard's chunks and their index into one value: one more copy of
    # every byte, a seventh of the time of a save.
    context.array.saving.use_zarr3 = False
    context.memory.transfer_concurrent_bytes = options.max_host_bytes
    context.memory.read_concurrent_bytes = options.max_host_bytes
    # Host leaves are copies already, made when the state was captured.
    context.memory.deepcopy_host_arrays = False
    if is_alone:
        context.multiprocessing.primary_host = jax.process_index()
        context.multiprocessing.active_processes = {jax.process_index()}
    with context, _without_raw_metrics:
        yield


@contextlib.contextmanager
def one_order(processes: Processes) -> Iterator[None]:
    """Holds ``one_at_a_time``, on every process for the same save or load; in a round."""
    if not processes.is_first:
        processes.share()  # comes once process 0 holds it
    with one_at_a_time:
        if processes.is_first:
            processes.share()
        yield


class _WithoutRawMetrics:
    """Keeps Orbax from asking TensorStore for its metrics, while anything is saved or loaded.

    TensorStore 0.1.86 never frees what it answers, 7 kB each time: 1 GB in 70,000 saves. Orbax
    only reports them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_within = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._num_within == 0:
                self._ask = tensorstore_utils.get_tensorstore_raw_bytes
                tensorstore_utils.get_tensorstore_raw_bytes = lambda *args, **kwargs: 0
            self._num_within += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_within -= 1
            if self._num_within == 0:
                tensorstore_utils.get_tensorstore_raw_bytes = self._ask


_without_raw_metrics = _WithoutRawMetrics()


@contextlib.contextmanager
def as_corrupt(committed: CommittedStep, what: str) -> Iterator[None]:
    """Damage, as CorruptCheckpointError; a medium that cannot be read now, as DirectoryError."""
    try:
        yield
    except (CheckpointError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # Orbax wraps what went wrong in many ways, Exception among them
        cause = medium.said(error)
        if medium.is_unavailable(error):
            advice = medium.advice(error, is_bucket=location.is_bucket(committed.path))
            raise DirectoryError(
                f"step {committed.step} in {committed.path}: its {what} cannot be read now, which "
                f"does not mean that the step is damaged: {cause}. {advice} Then try again; or "
                "name an older step.",
                step=committed.step,
                path=committed.path,
            ) from error
        raise CorruptCheckpointError(
            f"step {committed.step} in {committed.path}: cannot read its {what}: {cause}",
            step=committed.step,
            path=committed.path,
        ) from error
