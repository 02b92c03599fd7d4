"""A program that uses Orbax itself, through both APIs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax import checkpoint as v0
from orbax.checkpoint import v1 as ocp

from support.compare import assert_trees_identical


def abstract(state: Any) -> Any:
    """Returns the abstract state that Orbax needs to load a state."""
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            if isinstance(leaf, jax.Array)
            else np.zeros_like(leaf)
        ),
        state,
    )


def assert_came_back(found: Any, state: Any) -> None:
    """Asserts that two states are equal bit for bit, with equal shardings.

    Compares the addressable shards of arrays that several processes share.
    """

    def local(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return [np.asarray(shard.data) for shard in leaf.addressable_shards]

    assert_trees_identical(jax.tree.map(local, found), jax.tree.map(local, state))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert not isinstance(b, jax.Array) or a.sharding == b.sharding


def save_and_load(api: str, folder: Path, num_steps: int, state: Any) -> None:
    """Saves and loads a state in every way of one Orbax API, and asserts equality each time."""
    for step in range(num_steps):
        if api == "v1":
            ocp.save(folder / f"{step}", state)
            ocp.save_async(folder / f"{step}-async", state).result()
            loaded = [ocp.load(folder / f"{step}{end}", abstract(state)) for end in ("", "-async")]
        else:
            with v0.StandardCheckpointer() as checkpointer:
                checkpointer.save(folder / f"alone-{step}", state)
                checkpointer.wait_until_finished()
                loaded = [checkpointer.restore(folder / f"alone-{step}", abstract(state))]
            with v0.CheckpointManager(folder / "managed") as manager:
                manager.save(step, args=v0.args.StandardSave(state))
                manager.wait_until_finished()
                loaded.append(manager.restore(step, args=v0.args.StandardRestore(abstract(state))))
        for each in loaded:
            assert_came_back(each, state)
