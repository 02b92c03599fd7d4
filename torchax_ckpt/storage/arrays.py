"""Owns the content of a step: written, described and read through Orbax."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Sharding
from orbax.checkpoint import v1 as ocp

from torchax_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DirectoryError,
    ForeignCheckpointError,
    SaveError,
)
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Digests
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.sharding import unshared
from torchax_ckpt.storage import (
    batches,
    commits,
    cutting,
    digests,
    inspection,
    location,
    medium,
    modes,
    orbax_context,
    rendezvous,
    syncing,
)
from torchax_ckpt.storage.commits import MANIFEST, SUMMARY
from torchax_ckpt.storage.directory import CommittedStep
from torchax_ckpt.storage.inspection import STATE
from torchax_ckpt.storage.processes import ALONE, Processes

logger = logging.getLogger(__name__)

# How TensorStore names the folders of files with array data.
_DATA = "d"
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
    manifest: Callable[[Mapping[str, Digests]], Mapping[str, Any]],
    summary: Mapping[str, Any],
    options: CheckpointOptions,
    is_compressed: bool,
    *,
    stacks: Collection[str] = (),
    on_host: Callable[[int, int, int], None] = lambda number, count, nbytes: None,
    before_commit: Callable[[], None] = lambda: None,
    processes: Processes = ALONE,
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
      on_host: called for each batch of arrays, see ``batches.Batches``.
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
    coming = batches.Batches(arrays, stacks, options.max_host_bytes, on_host)
    later: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
    items = {STATE: tree or _PLACEHOLDER, MANIFEST: later, SUMMARY: digests.seal(summary)}
    with (
        modes.closed_while_written(path, opens=processes.is_first) as mode,
        orbax_context.for_saving(
            path,
            arrays,
            coming,
            mode,
            before_commit,
            is_compressed=is_compressed,
            is_alone=processes.count == 1,
        ),
    ):
        try:
            with one_order(processes), rendezvous.beginning(processes) as operation:
                response = ocp.save_checkpointables_async(path, items)
        except BaseException:
            coming.cancel()  # it may have begun
            raise
        with operation:
            try:
                # Not ``response.result``, which waits for the manifest also where all else failed.
                ended = response._thread_runner._future
                concurrent.futures.wait([coming.on_devices, ended], return_when=FIRST_COMPLETED)
                if not coming.on_devices.done():
                    ended.result()  # says why nobody asks for the arrays
                later.set_result(digests.seal(manifest(coming.taken())))
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
        syncing.sync_tree(path, but=_DATA)


def _require_readable(name: str, array: jax.Array | np.ndarray) -> None:
    count = cutting.num_pieces(array.shape, cutting.chunk_shape(array))
    if count > inspection.MAX_CHUNKS:
        raise SaveError(
            f"{name}: readers take at most {inspection.MAX_CHUNKS} chunks, found {count} in "
            f"{array.dtype}{list(array.shape)}",
            key_path=name,
        )
    if array.dtype != np.bool_:
        return
    own = unshared(array) if isinstance(array, jax.Array) else array
    if any((host.view(np.uint8) > 1).any() for _, host in digests.shards(own)):
        raise SaveError(
            f"{name}: expected booleans whose bytes are 0 or 1, which is all that storage gives "
            "back, found others; make them anew: x != 0",
            key_path=name,
        )


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
    with as_corrupt(committed, "checkpoint"), one_at_a_time, orbax_context.for_loading(options):
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
