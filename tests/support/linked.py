"""What the steps of a run share, and what Orbax alone reads from them."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding
from orbax import checkpoint as v0
from orbax.checkpoint import v1 as ocp

from support.compare import assert_trees_identical, bits
from support.own_orbax import abstract
from support.training import P, fsdp_mesh
from torchax_ckpt import CheckpointOptions, TorchaxCheckpointer


def files(directory: Path, step: int) -> set[int]:
    """The files of arrays of a step, as numbers that are equal for links to one file."""
    return {p.stat().st_ino for p in (directory / str(step) / "state").rglob("d/*")}


def aside(directory: Path) -> set[int]:
    """The files of arrays that a run keeps in its folder ``unchanged``."""
    return {p.stat().st_ino for p in (directory / "unchanged").rglob("d/*")}


def folders(directory: Path, step: int | str) -> list[str]:
    """The folders of a step's databases of frozen arrays."""
    found = (directory / str(step) / "state").glob("ocdbt.process_unchanged*")
    return sorted(path.name for path in found)


def databases(directory: Path, step: int) -> list[tuple[set[str], set[int]]]:
    """The leaves in each database of frozen arrays of a step, and the files of all processes."""
    manifest = json.loads((directory / str(step) / "manifest" / "data.json").read_text())
    found = []
    for name, entry in manifest.get("unchanged", {}).items():
        leaves = (manifest["stacks"].get(stored, [stored]) for stored in entry["xxh3_128"])
        paths = (
            path
            for folder in folders(directory, step)
            if re.fullmatch(rf"ocdbt\.process_{name}(x\d+)?", folder)
            for path in (directory / str(step) / "state" / folder).rglob("d/*")
        )
        found.append((set().union(*leaves), {path.stat().st_ino for path in paths}))
    return found


def by_orbax(
    directory: Path | epath.Path, step: int, *, on_other_devices: bool = False
) -> list[dict[str, np.ndarray]]:
    """All leaves of a step as Orbax alone reads them: by both APIs, with and without abstract.

    If the step was written by other devices than those there are, Orbax needs an abstract tree. The
    older API refuses items of a step in a bucket, because the commit mark lies above them.
    """
    path = directory / str(step)
    manifest = ocp.load_checkpointables(path, {"manifest": None})["manifest"]
    metadata = ocp.metadata(path, checkpointable_name="state").metadata
    whole = NamedSharding(fsdp_mesh(4), P())
    wanted = jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)
            if leaf.dtype != np.int64
            else np.zeros(leaf.shape, leaf.dtype)
        ),
        metadata,
    )
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sharding info not provided")
        trees = [ocp.load(path, wanted, checkpointable_name="state")]
        if not on_other_devices:
            trees.append(ocp.load(path, checkpointable_name="state"))
        if not on_other_devices and "://" not in str(path):
            trees.append(v0.PyTreeCheckpointer().restore(path / "state"))
        for tree in trees:
            arrays = {
                f"{component}/{name}" if name else component: np.asarray(leaf)
                for component, leaves in tree.items()
                for name, leaf in leaves.items()
            }
            for stack, members in manifest["stacks"].items():
                arrays |= dict(zip(members, arrays.pop(stack), strict=True))
            found.append(arrays)
    return found


def data_file(directory: Path, step: int | str, *, of_process: int = 0) -> Path:
    """The largest file of a database of frozen arrays of a step, or of those kept aside."""
    folder = directory / str(step) / "state" / folders(directory, step)[of_process]
    return max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)


def assert_holds(directory: Path, step: int, state: Any, *, on_other_devices: bool = False) -> None:
    """Asserts that this package and Orbax alone read the state from a step, bit for bit."""
    with TorchaxCheckpointer(directory, options=CheckpointOptions(read_only=True)) as ckpt:
        assert_trees_identical(ckpt.load(step, abstract(state)), state)
    expected = dict(_flat({"state": state}))
    for arrays in by_orbax(directory, step, on_other_devices=on_other_devices):
        assert {n: bits(arrays[n])[1:] for n in expected} == {
            n: bits(leaf)[1:] for n, leaf in expected.items()
        }


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
