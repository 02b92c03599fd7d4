"""Opens steps that Orbax alone wrote, like stored steps, but without digests; needs no Orbax."""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import tensorstore as ts
from etils import epath

from torchax_ckpt.errors import ForeignCheckpointError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import STORABLE_DTYPES, Manifest, Node
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.runtime import host_memory
from torchax_ckpt.storage.arrays import array_checks, chunking, tensorstore_context
from torchax_ckpt.storage.arrays.assembly import Bounds
from torchax_ckpt.storage.directory import step_files
from torchax_ckpt.storage.directory.committed_step import STATE, CommittedStep
from torchax_ckpt.storage.medium import containment, medium
from torchax_ckpt.stored.stored_step import Parts, StoredStep, still_there

logger = logging.getLogger(__name__)

_METADATA = "_METADATA"
_STRINGS = "_strings.json"
# What Orbax calls arrays, the values that it stores like arrays, and those that only it records.
_ARRAYS = frozenset({"jax.Array", "np.ndarray"})
_STORED = _ARRAYS | {"scalar", "string"}
_EMPTY: Mapping[str, Node] = {
    "None": None,
    "NamedTuple": None,
    "Dict": {"dict": []},
    "List": [],
    "Tuple": {"tuple": []},
}
_IN_SEQUENCE = 1  # Orbax's type of a key that is an index

Path = tuple[tuple[str, bool], ...]
"""The keys of a value in a pytree, and whether each is an index."""


def opened(committed: CommittedStep) -> StoredStep:
    """Opens a step of this package or of bare Orbax."""
    try:
        return StoredStep(committed)
    except ForeignCheckpointError:
        return ForeignStep(committed)


class ForeignStep(StoredStep):
    """A step with one pytree, or one called ``state``, which becomes functional state.

    All its arrays are of numpy's kind; a random key is its key data. Logs that it has no digests.
    """

    has_digests = False

    def _read_manifest(self) -> Manifest:
        step, path = self.committed.step, self.committed.path
        with step_files.as_corrupt(self.committed, "metadata"):
            medium.of(path).require_contained(path, step)
            folders = [path, *(p for p in path.iterdir() if p.is_dir())]
            trees = {p.name: p for p in folders if (p / _METADATA).exists()}
        if len(trees) != 1 and STATE not in trees:
            raise self.committed.error(
                ForeignCheckpointError,
                f"expected one pytree, or one called {STATE!r}, found {sorted(trees)}. Use Orbax "
                "to read this step",
            )
        with step_files.as_corrupt(self.committed, "metadata"):
            tree = trees.get(STATE) or next(iter(trees.values()))
            metadata = json.loads((tree / _METADATA).read_text(encoding="utf-8"))
            kinds = _kinds(metadata)
            for keys in kinds:
                if (name := _orbax_name(keys)).startswith("/") or ".." in name.split("/"):
                    raise containment.corrupt(step, tree, "arrays within the step", f"{name!r:.80}")
            stores = _opened(tree, metadata, kinds)
            arrays = {k: s for k, s in stores.items() if kinds[k] in _ARRAYS or s.rank}
            self.stores = {_name(keys): store for keys, store in arrays.items()}
            self._require_modest()
            values = {keys: stores[keys].read() for keys in stores.keys() - arrays.keys()}
            nodes: dict[Path, Node] = {}
            for keys, kind in kinds.items():
                if keys in values:
                    nodes[keys] = _plain(values[keys].result())
                elif keys in arrays:
                    shape, dtype = list(arrays[keys].shape), arrays[keys].dtype.numpy_dtype.name
                    described = {"array": _name(keys), "dtype": dtype, "shape": shape}
                    nodes[keys] = {**described, "kind": "numpy"}
                elif kind in _EMPTY:
                    nodes[keys] = _EMPTY[kind]
                else:
                    raise ValueError(f"{_name(keys)}: is of the type {kind!r:.80}")
        logger.info(
            "%s was written by Orbax alone and has no digests, so damage of it may go unnoticed",
            path,
        )
        empty = frozenset(name for name, store in self.stores.items() if 0 in store.shape)
        return Manifest({STATE: _node(nodes)}, Plan(empty=empty), {}, {})

    def read_parts(self, wanted: Mapping[str, Collection[Bounds]]) -> Parts:
        """Returns exactly the regions: pieces are chunks, and a chunk may be the whole array."""
        reading = {
            (name, bounds): self.stores[name][tuple(slice(*dim) for dim in bounds)].read()
            for name, every in wanted.items()
            for bounds in every
        }
        with still_there(self.committed), step_files.as_corrupt(self.committed, "arrays"):
            return {
                (name, bounds): [
                    (tuple(slice(b - a) for a, b in bounds), np.asarray(read.result()))
                ]
                for (name, bounds), read in reading.items()
            }

    def require_stored(self, leaves: Iterable[str]) -> int:
        """Returns the fewest bytes that arrays take; the manifest is their metadata."""
        return sum(self.leaves[name].nbytes // array_checks.MAX_UNPACKED for name in leaves)

    def _require_modest(self) -> None:
        """Raises for a dtype that has no form here, or chunks that no host could read."""
        step, path = self.committed.step, self.committed.path
        memory = host_memory.host_memory_bytes()
        for name, store in self.stores.items():
            if store.dtype.name not in STORABLE_DTYPES:
                raise ValueError(f"{name}: has the dtype {store.dtype.name}")
            chunk = [n or 1 for n in store.chunk_layout.read_chunk.shape or ()]
            count = chunking.num_pieces(store.shape, chunk)
            if count > array_checks.MAX_CHUNKS:
                expected = f"at most {array_checks.MAX_CHUNKS} chunks"
                raise containment.corrupt(step, path, expected, f"{count}", name)
            itemsize = store.dtype.numpy_dtype.itemsize
            needed, whole = math.prod(chunk) * itemsize, math.prod(store.shape) * itemsize
            if needed > max(memory, whole):
                expected = f"chunks within {list(store.shape)!r:.80}"
                raise containment.corrupt(step, path, expected, f"{chunk!r:.80}", name)
            if needed > memory:
                least = whole // array_checks.MAX_UNPACKED
                raise step_files.beyond_memory(self.committed, needed, least, name)


def _kinds(metadata: Mapping[str, Any]) -> dict[Path, str]:
    """Returns where each value is in the pytree -> what Orbax calls its type."""
    found = {}
    for entry in metadata["tree_metadata"].values():
        keys = ((str(key["key"]), key["key_type"] == _IN_SEQUENCE) for key in entry["key_metadata"])
        found[tuple(keys)] = entry["value_metadata"]["value_type"]
    return found


def _opened(
    tree: epath.Path, metadata: Mapping[str, Any], kinds: Mapping[Path, str]
) -> dict[Path, ts.TensorStore]:
    base, context = medium.of(tree).kvstore(tree), tensorstore_context.reading_context()
    opening = {}
    for keys, kind in kinds.items():
        if kind not in _STORED:
            continue
        folder = f"{name}/" if (name := _orbax_name(keys)) else ""
        kvstore: dict[str, Any] = {**base, "path": f"{base['path']}{folder}"}
        if metadata.get("use_ocdbt", True):
            cache = "cache_pool#ocdbt"
            kvstore = {"driver": "ocdbt", "base": base, "path": folder, "cache_pool": cache}
        spec: dict[str, Any] = {
            "driver": "zarr3" if metadata.get("use_zarr3") else "zarr",
            "kvstore": kvstore,
            # Older releases of Orbax left out chunks of zeros.
            "fill_missing_data_reads": not metadata.get("store_array_data_equal_to_fill_value"),
        }
        if kind == "string":
            strings = {**base, "path": f"{base['path']}{_STRINGS}"}
            spec = {"driver": "json", "kvstore": strings, "json_pointer": f"/{name}"}
        opening[keys] = ts.open(spec, open=True, read=True, context=context)
    return {keys: future.result() for keys, future in opening.items()}


def _orbax_name(keys: Path) -> str:
    return ".".join(key for key, _ in keys)


def _name(keys: Path) -> str:
    return names.join(key for key, _ in keys)


def _plain(array: np.ndarray) -> Node:
    """Returns the node of a number or string."""
    value = array.item()
    if not isinstance(value, (bool, int, float, str)):
        raise ValueError(f"expected a number or string, found a {type(value).__name__}")
    is_special = isinstance(value, float) and not math.isfinite(value)
    return {"float": struct.pack(">d", value).hex()} if is_special else value


def _node(nodes: Mapping[Path, Node]) -> Node:
    """Returns the node of a pytree, given the nodes of its leaves."""
    if () in nodes:
        return nodes[()]
    children: dict[tuple[str, bool], dict[Path, Node]] = {}
    for (first, *rest), node in nodes.items():
        children.setdefault(first, {})[tuple(rest)] = node
    found = {key: _node(below) for key, below in children.items()}
    indices = [(str(i), True) for i in range(len(found))]
    if found.keys() == {*indices}:
        return [found[index] for index in indices]
    return {"dict": [[key, node] for (key, _), node in found.items()]}
