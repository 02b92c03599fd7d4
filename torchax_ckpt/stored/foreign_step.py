"""Opens steps that Orbax alone wrote, like stored steps, but without digests; needs no Orbax."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import tensorstore as ts
from etils import epath

from torchax_ckpt.errors import CorruptCheckpointError, ForeignCheckpointError
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.runtime import host_memory
from torchax_ckpt.storage.arrays import array_checks
from torchax_ckpt.storage.arrays.assembly import Bounds, Index
from torchax_ckpt.storage.directory import step_files
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.medium import containment, location
from torchax_ckpt.stored.stored_step import Part, StoredLeaf, StoredStep, still_there

logger = logging.getLogger(__name__)

_METADATA = "_METADATA"
# What Orbax calls the values that it stores as arrays, and the kinds that they have here.
_KINDS = {"jax.Array": "jax", "np.ndarray": "jax", "scalar": "numpy_scalar"}


def opened(committed: CommittedStep) -> StoredStep | ForeignStep:
    """Opens a step; logs a warning if it has no digests, because Orbax alone wrote it."""
    try:
        return StoredStep(committed)
    except ForeignCheckpointError:
        found = ForeignStep(committed)
        logger.warning(
            "%s was written by Orbax alone and has no digests, so damage of it may go unnoticed",
            committed.path,
        )
        return found


class ForeignStep:
    """A step with one pytree of arrays; the errors are those of ``StoredStep``."""

    def __init__(self, committed: CommittedStep) -> None:
        self.committed = committed
        with still_there(committed), step_files.as_corrupt(committed, "metadata"):
            containment.require_contained(committed.path, committed.step)
            array_checks.require_names_within(committed.path, committed.step)
            folders = [committed.path, *(p for p in committed.path.iterdir() if p.is_dir())]
            trees = [folder for folder in folders if (folder / _METADATA).exists()]
            if len(trees) != 1:
                raise ValueError(f"expected one pytree, found {[tree.name for tree in trees]}")
            (tree,) = trees
            metadata = json.loads((tree / _METADATA).read_text())
            paths: dict[str, list[str]] = {}
            kinds: dict[str, str] = {}
            for entry in metadata["tree_metadata"].values():
                keys = [str(key["key"]) for key in entry["key_metadata"]]
                if kind := _KINDS.get(entry["value_metadata"]["value_type"]):
                    paths[".".join(keys)], kinds[".".join(keys)] = keys, kind
            self._stores = _opened(tree, metadata, paths)
            self.leaves = {
                name: StoredLeaf(name, kinds[name], found.dtype.name, tuple(found.shape), None)
                for name, found in self._stores.items()
            }
            self._require_modest()
            # As in a manifest; the pytree's lists become dicts with the indices as keys.
            root = _node({tuple(keys): self.leaves[name] for name, keys in paths.items()})
            if "dict" not in root:
                raise ValueError("expected a pytree of named arrays, found an array alone")
            self.document: Mapping[str, Node] = dict(root["dict"])

    def read_parts(self, wanted: Mapping[str, Collection[Bounds]]) -> dict[str, list[Part]]:
        """Does what ``StoredStep.read_parts`` does, but compares nothing."""
        reading = {
            name: [(i, self._stores[name][i].read()) for i in (_index(b) for b in every)]
            for name, every in wanted.items()
        }
        with still_there(self.committed), step_files.as_corrupt(self.committed, "arrays"):
            return {
                name: [(index, np.ascontiguousarray(read.result())) for index, read in every]
                for name, every in reading.items()
            }

    def _require_modest(self) -> None:
        """Raises CorruptCheckpointError if a chunk exceeds the memory of this host."""
        memory = host_memory.host_memory_bytes()
        for name, store in self._stores.items():
            chunk = math.prod(n or 1 for n in store.chunk_layout.read_chunk.shape or ())
            if chunk * store.dtype.numpy_dtype.itemsize > memory:
                text = f"{name}: expected chunks that fit into memory, found {chunk} elements"
                raise self.committed.error(CorruptCheckpointError, text, name)


def _opened(
    tree: epath.Path, metadata: Mapping[str, Any], names: Collection[str]
) -> dict[str, ts.TensorStore]:
    base = location.kvstore(tree)
    context = location.reading_context()
    opening = {}
    for name in names:
        kvstore: dict[str, Any] = {**base, "path": f"{base['path']}{name}/"}
        if metadata.get("use_ocdbt", True):
            cache = "cache_pool#ocdbt"
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/", "cache_pool": cache}
        driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
        # Older releases of Orbax left out chunks of zeros.
        fills = not metadata.get("store_array_data_equal_to_fill_value")
        spec = {"driver": driver, "kvstore": kvstore, "fill_missing_data_reads": fills}
        opening[name] = ts.open(spec, open=True, read=True, context=context)
    return {name: future.result() for name, future in opening.items()}


def _index(bounds: Bounds) -> Index:
    return tuple(slice(low, high) for low, high in bounds)


def _node(leaves: Mapping[tuple[str, ...], StoredLeaf]) -> Node:
    """Returns the node of a pytree, given key path -> array."""
    if () in leaves:
        leaf = leaves[()]
        node = {"array": leaf.name, "kind": leaf.kind, "dtype": leaf.dtype}
        return {**node, "shape": list(leaf.shape)}
    children: dict[str, dict[tuple[str, ...], StoredLeaf]] = {}
    for (first, *rest), leaf in leaves.items():
        children.setdefault(first, {})[tuple(rest)] = leaf
    return {"dict": [[key, _node(below)] for key, below in children.items()]}
