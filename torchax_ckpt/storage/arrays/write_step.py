"""The content of a step, written and described through Orbax."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_COMPLETED
from typing import Any

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from torchax_ckpt.errors import SaveError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Digests
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.processes.coordination import SINGLE_PROCESS, Processes
from torchax_ckpt.snapshot.sharding import unshared
from torchax_ckpt.storage.arrays import (
    array_checks,
    block_digests,
    chunking,
    host_batches,
    orbax_context,
    orbax_internals,
)
from torchax_ckpt.storage.directory.committed_step import MANIFEST, STATE, SUMMARY
from torchax_ckpt.storage.medium import fsync, permissions, seals

logger = logging.getLogger(__name__)

# How TensorStore names the folders of files with array data.
_DATA = "d"
# An item needs content; a state may have no stored arrays at all.
_PLACEHOLDER = {"empty": np.zeros(1, np.uint8)}


def write_step(
    path: epath.Path,
    arrays: Mapping[str, jax.Array | np.ndarray],
    manifest: Callable[[Mapping[str, Digests]], Mapping[str, Any]],
    summary: Mapping[str, Any],
    options: CheckpointOptions,
    is_compressed: bool,
    *,
    stacks: Collection[str] = (),
    on_host: Callable[[int, int, int], None] = lambda number, count, nbytes: None,
    before_commit: Callable[[], None] = lambda: None,
    processes: Processes = SINGLE_PROCESS,
) -> None:
    """Writes and commits a step; returns when it is durable. Call it off the training thread.

    Every process writes what its devices hold, and process 0 the host arrays and the JSON.

    Args:
      path: the directory of the step, which must not exist.
      arrays: stored name -> array.
      manifest: gives JSON, of the digests by stored name of what this process stores; called on
        this thread while the last arrays are being written.
      summary: JSON.
      options: memory bounds.
      is_compressed: whether the arrays are compressed.
      stacks: which arrays are stacks.
      on_host: called for each batch of arrays, see ``host_batches.Batches``.
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
    coming = host_batches.Batches(arrays, stacks, options.max_host_bytes, on_host)
    later: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
    items = {STATE: tree or _PLACEHOLDER, MANIFEST: later, SUMMARY: seals.seal(summary)}
    with (
        permissions.closed_while_written(path, opens=processes.is_first) as mode,
        orbax_context.for_saving(
            path,
            arrays,
            coming,
            mode,
            before_commit,
            is_compressed=is_compressed,
            is_alone=processes.count == 1,
        ),
        orbax_context.operation(processes),
    ):
        try:
            with orbax_context.one_order(processes):
                response = ocp.save_checkpointables_async(path, items)
        except BaseException:
            coming.cancel()  # it may have begun
            raise
        try:
            # Not ``response.result``, which waits for the manifest also where all else failed.
            ended = orbax_internals.future_of(response)
            concurrent.futures.wait([coming.on_devices, ended], return_when=FIRST_COMPLETED)
            if not coming.on_devices.done():
                ended.result()  # says why nobody asks for the arrays
            later.set_result(seals.seal(manifest(coming.taken())))
        except BaseException as error:
            coming.cancel()
            later.set_exception(error)  # which ends the save
            # Where Orbax has given up, only it can say why.
            is_known = not isinstance(error, concurrent.futures.CancelledError)
            with contextlib.suppress(Exception) if is_known else contextlib.nullcontext():
                response.result()
            raise
        response.result()
    if processes.is_first:
        fsync.sync_tree(path, but=_DATA)


def _require_readable(name: str, array: jax.Array | np.ndarray) -> None:
    count = chunking.num_pieces(array.shape, chunking.chunk_shape(array))
    if count > array_checks.MAX_CHUNKS:
        raise SaveError(
            f"{name}: readers take at most {array_checks.MAX_CHUNKS} chunks, found {count} in "
            f"{array.dtype}{list(array.shape)}",
            key_path=name,
        )
    if array.dtype != np.bool_:
        return
    own = unshared(array) if isinstance(array, jax.Array) else array
    if any((host.view(np.uint8) > 1).any() for _, host in block_digests.shards(own)):
        raise SaveError(
            f"{name}: expected booleans whose bytes are 0 or 1, which is all that storage gives "
            "back, found others; make them anew: x != 0",
            key_path=name,
        )
