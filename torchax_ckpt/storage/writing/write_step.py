"""Writes the content of a step through Orbax, and commits the step."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_COMPLETED
from typing import Any

import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from torchax_ckpt.errors import SaveError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Digests
from torchax_ckpt.options import CheckpointOptions, Codec
from torchax_ckpt.processes.coordination import SINGLE_PROCESS, Processes
from torchax_ckpt.storage.arrays import array_checks, chunking, orbax_context, orbax_internals
from torchax_ckpt.storage.arrays.chunking import AnyArray
from torchax_ckpt.storage.arrays.placed_array import Place
from torchax_ckpt.storage.directory.committed_step import ASSETS, MANIFEST, STATE, SUMMARY
from torchax_ckpt.storage.medium import fsync, permissions, seals
from torchax_ckpt.storage.writing import host_batches, orbax_saving

logger = logging.getLogger(__name__)

# The name that TensorStore gives to folders that hold files of array data.
_DATA = "d"
# Orbax requires content in each item, but a state may have no stored arrays at all.
_PLACEHOLDER = {"empty": np.zeros(1, np.uint8)}


def write_step(
    path: epath.Path,
    arrays: Mapping[str, AnyArray],
    manifest: Callable[[Mapping[str, Digests]], Mapping[str, Any]],
    summary: Mapping[str, Any],
    options: CheckpointOptions,
    codec: Codec | None,
    *,
    stacks: Collection[str] = (),
    places: Mapping[str, Place] | None = None,
    assets: bytes | None = None,
    on_host: Callable[[int, int, int], None] = lambda number, count, nbytes: None,
    before_commit: Callable[[epath.Path], None] = lambda folder: None,
    processes: Processes = SINGLE_PROCESS,
) -> None:
    """Writes a step, and last Orbax's commit mark; returns when both are durable.

    On a file system the step then still has a temporary name, until the caller renames it with
    ``RunDirectory.commit``. Do not call this function on the training thread. Each process writes
    the shards that its devices hold. Process 0 also writes the host arrays, the manifest, the
    summary and the assets.

    Args:
      path: the directory of the step, which must not exist.
      arrays: stored name -> array.
      manifest: returns the manifest as JSON, given stored name -> digests of what this process
        stores, except of linked arrays; called on this thread while the last arrays are being
        written.
      summary: the summary as JSON.
      options: memory bounds.
      codec: how the arrays are compressed; None for not at all.
      stacks: the names of the arrays that are stacks.
      places: name -> where an array is stored, for arrays in databases of unchanged arrays.
      assets: the encoded assets, b"" on processes other than process 0; None for a step without.
      on_host: called for each batch of arrays, see ``host_batches.Batches``.
      before_commit: called on process 0 when everything else is written, right before the commit
        mark is written, with the step's folder, which on a file system has a temporary name. If it
        raises, the step is not committed.
      processes: the processes that write the step together, in a round.

    Raises:
      SaveError, ValueError: readers would reject the step; nothing is committed.
    """
    tree: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        component, rest = names.component_and_rest(name)
        announced = host_batches.announced(array, (places or {}).get(name))
        tree.setdefault(component, {})[rest] = announced
        _require_readable(name, array)

    def complete(folder: epath.Path) -> None:
        for place in (places or {}).values():  # those of host arrays are known to be complete now
            place.require_complete()
        before_commit(folder)

    batches = host_batches.Batches(arrays, stacks, places or {}, options.max_host_bytes, on_host)
    pending_manifest: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
    items: dict[str, Any] = {
        STATE: tree or _PLACEHOLDER,
        MANIFEST: pending_manifest,
        SUMMARY: seals.seal(summary),
    }
    if assets is not None:
        items[ASSETS] = assets
    with (
        permissions.closed_while_written(path, opens=processes.is_first) as mode,
        orbax_saving.for_saving(
            path,
            arrays,
            batches,
            mode,
            complete,
            codec=codec,
            is_alone=processes.count == 1,
        ),
        orbax_context.operation(processes),
    ):
        try:
            with orbax_context.one_order(processes):
                response = ocp.save_checkpointables_async(path, items)
        except BaseException:
            batches.cancel()  # Orbax may have begun to write
            raise
        try:
            # ``response.result`` would wait for the manifest even if everything else has failed.
            ended = orbax_internals.future_of(response)
            concurrent.futures.wait([batches.on_devices, ended], return_when=FIRST_COMPLETED)
            if not batches.on_devices.done():
                ended.result()  # raises Orbax's reason for not writing the arrays
            pending_manifest.set_result(seals.seal(manifest(batches.taken())))
        except BaseException as error:
            batches.cancel()
            pending_manifest.set_exception(error)  # ends Orbax's wait for the manifest
            # If Orbax has given up, only Orbax knows the reason.
            is_known = not isinstance(error, concurrent.futures.CancelledError)
            with contextlib.suppress(Exception) if is_known else contextlib.nullcontext():
                response.result()
            raise
        response.result()
    if processes.is_first:
        fsync.sync_tree(path, but=_DATA)


def _require_readable(name: str, array: AnyArray) -> None:
    """Raises if readers would reject an array because of its size."""
    count = chunking.num_pieces(array.shape, chunking.chunk_shape(array))
    if count > array_checks.MAX_CHUNKS:
        raise SaveError(
            f"{name}: expected an array of at most {array_checks.MAX_CHUNKS} chunks, found {count} "
            f"chunks in {array.dtype}{list(array.shape)}; divide the array into several",
            key_path=name,
        )
