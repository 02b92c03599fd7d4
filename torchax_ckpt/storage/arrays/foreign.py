"""Describes and reads steps that Orbax wrote without this package."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from orbax.checkpoint import v1 as ocp

from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.storage.arrays import array_checks
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.step_files import as_corrupt

# Orbax reads the number of its newest operation where it needs that of the current one.
_one_at_a_time = threading.RLock()


def load_foreign(committed: CommittedStep, abstract_state: Any, options: CheckpointOptions) -> Any:
    """Returns the content of a step that Orbax wrote alone; all host arrays without abstract state.

    Raises CorruptCheckpointError if Orbax cannot read the step as requested.
    """
    metadata = foreign_metadata(committed)
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    context.memory.read_concurrent_bytes = options.max_host_bytes
    # Each process reads for itself. Orbax would wait for the others at barriers whose names hold a
    # number that each process counts for itself, so a load on one process would confuse them.
    context.multiprocessing.primary_host = jax.process_index()
    context.multiprocessing.active_processes = {jax.process_index()}
    with as_corrupt(committed, "checkpoint"), _one_at_a_time, context:
        if abstract_state is None:
            # Without an abstract state, Orbax rebuilds the mesh on which the step was saved, which
            # fails on any other mesh. Host arrays need no mesh.
            abstract_state = jax.tree.map(_host_abstract, metadata)
        return ocp.load(committed.path, abstract_state)


def foreign_metadata(committed: CommittedStep) -> Any:
    """Returns a pytree of the shapes and dtypes in a step that Orbax wrote without this package."""
    with as_corrupt(committed, "metadata"):
        array_checks.require_names_within(committed.path, committed.step)
        metadata = ocp.metadata(committed.path).metadata
        paths, _ = jax.tree_util.tree_flatten_with_path(metadata)
        array_checks.require_modest(
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
    """Returns the abstract leaf of a sharded JAX array or, without sharding, a numpy array."""
    dtype = np.dtype(dtype)
    if sharding is not None:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    # A numpy array as abstract leaf makes Orbax read a numpy array. This one takes no memory.
    return np.broadcast_to(np.zeros((), dtype), shape)
