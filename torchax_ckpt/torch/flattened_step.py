"""A step as DCP sees it: flattened names, what has them, and the parts that a rank asks for."""

from __future__ import annotations

import contextlib
import copy
import io
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from torchax_ckpt.errors import SelectionError, UnsupportedLeafError
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.plain_torch import native_torch, tensor_of
from torchax_ckpt.state import per_process_state
from torchax_ckpt.state.findings import Findings
from torchax_ckpt.storage.arrays.assembly import Bounds, bounds_of, overlap
from torchax_ckpt.storage.directory.committed_step import STATE
from torchax_ckpt.stored.foreign_step import ForeignStep
from torchax_ckpt.stored.stored_step import Part, StoredStep, about
from torchax_ckpt.torch.load_planner import LoadPlanner, StepMeta, differences
from torchax_ckpt.torch.state_trees import WIDER, compare, stand_in, tree_of

Parts = Mapping[str, Sequence[Part]]


class FlattenedStep:
    """A step, with the names that DCP's planners give to the state dict of a program."""

    def __init__(self, content: StoredStep, prefix: str | Mapping[str, str]) -> None:
        self._content, self.committed = content, content.committed
        # id of what stands for a leaf -> this object, so that the id stays its, and the leaf's node
        self._nodes: dict[int, tuple[object, Node]] = {}
        document: Mapping[str, Node] = content.document
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        with native_torch(), about(self.committed):
            where = f"step {self.committed.step}"
            document = per_process_state.document_of(document, rank, ranks, where)
            tree = tree_of(document, self._stand_in)
            if isinstance(content, ForeignStep) and isinstance(tree[STATE], dict):
                tree = tree[STATE]  # the keys of the pytree are the program's
            tree = _placed(tree, prefix)
            self._values, paths = flatten_state_dict(tree)
        self.metadata = dcp.Metadata(
            {name: _described(value) for name, value in self._values.items()},
            planner_data=paths,
            storage_meta=StepMeta(
                checkpoint_id=str(self.committed.path), save_id=str(self.committed.step)
            ),
        )

    def _stand_in(self, node: Node) -> object:
        """Returns what stands for a leaf: a tensor on the meta device, if the leaf is a tensor."""
        if isinstance(self._content, ForeignStep):
            node = {**node, "kind": "torch"}  # Orbax stores numpy's arrays like others
        tensor = None
        with contextlib.suppress(UnsupportedLeafError):  # of a dtype that torch lacks
            tensor = stand_in(node)
        found = object() if tensor is None else tensor
        self._nodes[id(found)] = found, node
        return found

    def read(self, items: Sequence[ReadItem], planned: FlattenedStep) -> Parts:
        """Returns the parts of leaves for items that were planned for this step or a newer one.

        Raises MismatchError if the newer one has tensors of other shapes or dtypes.
        """
        findings, regions = Findings(), dict[str, set[Any]]()
        for item in items:
            name = item.storage_index.fqn
            if name not in self._values:
                findings.missing.append(name)
            elif planned is not self:
                compare(name, planned._values[name], self._values[name], findings)
        if findings:
            raise differences(findings, self.metadata)
        for item in items:
            for leaf, bounds in self._needs(item):
                regions.setdefault(leaf, set()).add(bounds)
        return self._content.read_parts(regions)

    def _needs(self, item: ReadItem) -> Iterator[tuple[str, Bounds]]:
        value = self._values[item.storage_index.fqn]
        if item.type == LoadItemType.TENSOR:
            ends = map(operator.add, item.storage_offsets, item.lengths)
            bounds = tuple(zip(item.storage_offsets, ends, strict=True))
            yield self._nodes[id(value)][1]["array"], bounds
        else:
            for _, node in self._leaves_in(value):
                yield node["array"], bounds_of(None, tuple(node["shape"]))

    def _leaves_in(self, value: Any) -> Iterator[tuple[object, Node]]:
        """Yields what stands for the leaves in a value, and their nodes."""
        if (known := self._nodes.get(id(value))) is not None:
            yield known
        elif isinstance(value, (dict, list, tuple, set, frozenset)):
            for child in value.values() if isinstance(value, dict) else value:
                yield from self._leaves_in(child)

    def _filled(self, value: Any, parts: Parts) -> Any:
        """Returns a value with arrays and tensors in place of what stands for them."""
        leaves: dict[int, Any] = {}
        for found, node in self._leaves_in(value):
            array = np.empty(node["shape"], node["dtype"])
            for index, host in parts[node["array"]]:
                array[index] = host
            if isinstance(found, torch.Tensor):
                leaves[id(found)] = tensor_of(array, found.dtype)
            else:
                leaves[id(found)] = array[()] if node["kind"] == "numpy_scalar" else array
        return copy.deepcopy(value, leaves)

    def fill(self, items: Sequence[ReadItem], planner: dcp.LoadPlanner, parts: Parts) -> None:
        """Copies parts into the program's tensors, and gives it the values that are no tensors.

        Raises MismatchError before, if a tensor has another dtype.
        """
        findings = Findings()
        targets = []
        for item in items:
            if item.type == LoadItemType.TENSOR:
                target, name = planner.resolve_tensor(item).detach(), item.storage_index.fqn
                dtype = self._values[name].dtype
                if target.dtype not in (dtype, WIDER.get(dtype)):
                    findings.mismatch(name, target.dtype, dtype)
                targets.append((item, target, dtype))
        if findings:
            raise differences(findings, self.metadata)
        for item, target, dtype in targets:
            ((leaf, bounds),) = self._needs(item)
            for index, host in parts[leaf]:
                if (both := overlap(bounds, index)) is not None:
                    source = tensor_of(host, dtype)
                    target[both[0]].copy_(source[both[1]])
            planner.commit_tensor(item, target)
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                value = self._filled(self._values[item.storage_index.fqn], parts)
                if isinstance(planner, LoadPlanner):
                    planner.load_value(item, value)
                else:
                    planner.load_bytes(item, _pickled(value))


def _placed(tree: Mapping[str, Any], prefix: str | Mapping[str, str]) -> dict[str, Any]:
    """Returns the tree with its components under the keys that the program has for them."""
    if isinstance(prefix, str):
        return {prefix: dict(tree)} if prefix else dict(tree)
    if unknown := prefix.keys() - tree.keys():
        raise SelectionError(
            f"prefix: expected components of the step, {', '.join(sorted(tree))}; found "
            f"{', '.join(sorted(unknown))}"
        )
    placed: dict[str, Any] = {}
    for component, state in tree.items():
        key = prefix.get(component, component)
        added = {key: state} if key else state
        if clash := placed.keys() & added.keys():
            raise SelectionError(f"prefix: two components would be at {min(clash)}; name others")
        placed |= added
    return placed


def _described(value: Any) -> dcp_metadata.STORAGE_TYPES:
    if not isinstance(value, torch.Tensor):
        return dcp_metadata.BytesStorageMetadata()
    whole = dcp_metadata.ChunkStorageMetadata(torch.Size([0] * value.ndim), value.shape)
    properties = dcp_metadata.TensorProperties(value.dtype)
    return dcp_metadata.TensorStorageMetadata(properties, value.shape, [whole])


def _pickled(value: Any) -> io.BytesIO:
    """Returns a value as the bytes that DCP's own planner unpickles."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream
