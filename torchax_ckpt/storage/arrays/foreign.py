"""Steps that Orbax wrote without this package: what is in them, and reading it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from orbax.checkpoint import v1 as ocp

from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.storage.arrays import array_checks, orbax_context
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.step_files import as_corrupt


def load_foreign(
    committed: CommittedStep, abstract_state: Any, options: CheckpointOptions, processes: Processes
) -> Any:
    """Reads a step that bare Orbax wrote.

    Args:
      committed: the step.
      abstract_state: a pytree of ShapeDtypeStructs, or None for everything, as host arrays.
      options: memory bounds.
      processes: those that read it together, in a round.

    Raises:
      CorruptCheckpointError: Orbax cannot read it as the abstract state asks.
    """
    metadata = foreign_metadata(committed)
    with (
        orbax_context.operation(processes),
        as_corrupt(committed, "checkpoint"),
        orbax_context.one_at_a_time,
        orbax_context.for_loading(options),
    ):
        if abstract_state is None:
            # Without an abstract state Orbax rebuilds the mesh it was saved on, which fails on
            # any other; host arrays need none.
            abstract_state = jax.tree.map(_host_abstract, metadata)
        return ocp.load(committed.path, abstract_state)


def foreign_metadata(committed: CommittedStep) -> Any:
    """What Orbax says of a step that bare Orbax wrote: a pytree of shapes and dtypes."""
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
    """What Orbax is asked for: an array on a sharding, or a numpy array."""
    dtype = np.dtype(dtype)
    if sharding is not None:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    # Orbax reads into numpy where the abstract leaf is a numpy array; this one takes no memory.
    return np.broadcast_to(np.zeros((), dtype), shape)
