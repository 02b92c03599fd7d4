"""Owns the content of a step: written, described and read through Orbax."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from absl import flags
from etils import epath
from jax.sharding import Sharding
from orbax.checkpoint import v1 as ocp

from torchax_ckpt.errors import CorruptCheckpointError, ForeignCheckpointError
from torchax_ckpt.layout import names
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.storage.directory import SUMMARY, CommittedStep

logger = logging.getLogger(__name__)

STATE = "state"
MANIFEST = "manifest"
# Several files are written, synced and read at a time; Orbax's default, 2 GB, is mostly one.
_DATA_FILE_BYTES = 64 << 20
# An item needs content; a state may have no stored arrays at all.
_PLACEHOLDER = {"empty": np.zeros(1, np.uint8)}


def write_step(
    path: epath.Path,
    arrays: Mapping[str, jax.Array | np.ndarray],
    manifest: Mapping[str, Any],
    summary: Mapping[str, Any],
    options: CheckpointOptions,
    *,
    on_transferred: Callable[[], None],
) -> None:
    """Writes and commits a step; returns when it is durable. Call it off the training thread.

    Args:
      path: the directory of the step, which must not exist.
      arrays: stored name -> array.
      manifest, summary: JSON.
      options: compression and memory bounds.
      on_transferred: called as soon as all arrays are on the host.
    """
    tree: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        component, rest = names.component_and_rest(name)
        tree.setdefault(component, {})[rest] = array
    with _context(options):
        response = ocp.save_checkpointables_async(
            path,
            {STATE: tree or _PLACEHOLDER, MANIFEST: dict(manifest), SUMMARY: dict(summary)},
        )
        on_transferred()
        response.result()


def read_manifest(committed: CommittedStep) -> Any:
    """The manifest of a step, as JSON.

    Raises:
      ForeignCheckpointError: the step has none: bare Orbax wrote it.
      CorruptCheckpointError: it cannot be read.
    """
    if not (committed.path / MANIFEST).exists():
        raise ForeignCheckpointError(
            f"step {committed.step} in {committed.path} has no manifest: it was not written by "
            "torchax_ckpt, so its arrays cannot be matched with torch's names. Read it with "
            "load(step, abstract_state) and assign the result yourself.",
            step=committed.step,
            path=committed.path,
        )
    with _as_corrupt(committed, "manifest"):
        return ocp.load_checkpointables(committed.path, {MANIFEST: None})[MANIFEST]


def read_arrays(
    committed: CommittedStep,
    wanted: Mapping[str, tuple[tuple[int, ...], str, Sharding | None]],
    options: CheckpointOptions,
) -> dict[str, Any]:
    """Reads some arrays of a step.

    Args:
      committed: the step.
      wanted: stored name -> shape, dtype and sharding; None for a numpy array.
      options: memory bounds.

    Raises:
      CorruptCheckpointError: an array is not there, or cannot be read.
    """
    if not wanted:
        return {}
    abstract: dict[str, dict[str, Any]] = {}
    for name, (shape, dtype, sharding) in wanted.items():
        component, rest = names.component_and_rest(name)
        abstract.setdefault(component, {})[rest] = abstract_array(shape, dtype, sharding)
    with _as_corrupt(committed, "arrays"), _context(options):
        loaded = ocp.load_checkpointables(committed.path, {STATE: abstract})[STATE]
    result = {}
    for name, (shape, dtype, _) in wanted.items():
        component, rest = names.component_and_rest(name)
        array = loaded.get(component, {}).get(rest)
        found = getattr(array, "dtype", None), getattr(array, "shape", None)
        if not isinstance(array, (jax.Array, np.ndarray)) or found != (np.dtype(dtype), shape):
            raise CorruptCheckpointError(
                f"step {committed.step} in {committed.path}: {name}: expected an array "
                f"{dtype}{list(shape)}, found {type(array).__name__} {found[0]}{found[1]}",
                step=committed.step,
                path=committed.path,
                key_path=name,
            )
        result[name] = array
    return result


def load_foreign(committed: CommittedStep, abstract_state: Any, options: CheckpointOptions) -> Any:
    """Reads a step that bare Orbax wrote.

    Args:
      committed: the step.
      abstract_state: a pytree of ShapeDtypeStructs, or None for everything, as host arrays.
      options: memory bounds.

    Raises:
      CorruptCheckpointError: Orbax cannot read it as the abstract state asks.
    """
    with _as_corrupt(committed, "checkpoint"), _context(options):
        if abstract_state is None:
            # Without an abstract state Orbax rebuilds the mesh it was saved on, which fails on
            # any other; host arrays need none.
            metadata = ocp.metadata(committed.path).metadata
            abstract_state = jax.tree.map(_host_abstract, metadata)
        return ocp.load(committed.path, abstract_state)


def foreign_metadata(committed: CommittedStep) -> Any:
    """What Orbax says of a step that bare Orbax wrote: a pytree of shapes and dtypes."""
    with _as_corrupt(committed, "metadata"):
        return ocp.metadata(committed.path).metadata


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
def _context(options: CheckpointOptions) -> Iterator[None]:
    _use_coordination_service()
    registry = ocp.handlers.local_registry()
    # A dict of JSON would otherwise be taken for a pytree of scalars.
    for item in (MANIFEST, SUMMARY):
        registry.add(ocp.handlers.JsonHandler, checkpointable_name=item)
    context = ocp.Context()
    context.checkpointables.registry = registry
    context.pytree.loading.partial_load = True
    context.array.saving.use_compression = options.compression
    context.array.saving.ocdbt_target_data_file_size = _DATA_FILE_BYTES
    context.memory.transfer_concurrent_bytes = options.max_host_bytes
    context.memory.read_concurrent_bytes = options.max_host_bytes
    # Host leaves are copies already, made when the state was captured.
    context.memory.deepcopy_host_arrays = False
    with context:
        yield


def _use_coordination_service() -> None:
    """Has Orbax synchronise processes through JAX's coordination service.

    By default it uses collectives on the devices, which from a background thread would cross
    those of the training step.
    """
    if jax.process_count() == 1:
        return
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    flags.FLAGS["experimental_orbax_use_distributed_barrier"].value = True


@contextlib.contextmanager
def _as_corrupt(committed: CommittedStep, what: str) -> Iterator[None]:
    try:
        yield
    except CorruptCheckpointError:
        raise
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CorruptCheckpointError(
            f"step {committed.step} in {committed.path}: cannot read its {what}: {error}",
            step=committed.step,
            path=committed.path,
        ) from error
