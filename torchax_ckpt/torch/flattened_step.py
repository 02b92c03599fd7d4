"""A step as DCP sees it: flattened names, what has them, and the parts that a rank asks for."""

from __future__ import annotations

import copy
import functools
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
from torchax_ckpt.storage.arrays.assembly import Bounds, bounds_of
from torchax_ckpt.storage.directory.committed_step import STATE
from torchax_ckpt.stored.foreign_step import ForeignStep
from torchax_ckpt.stored.stored_step import Parts, StoredStep, about
from torchax_ckpt.torch.load_planner import LoadPlanner, StepMeta, differences
from torchax_ckpt.torch.state_trees import WIDER, compare, revived, stand_in, tree_of


class FlattenedStep:
    """A step, with the names that DCP's planners give to the state dict of a program."""

    def __init__(self, content: StoredStep, prefix: str | Mapping[str, str]) -> None:
        self._content, self.committed = content, content.committed
        # id of what stands for a leaf -> this object, so that the id stays its, and the leaf's node
        self._nodes: dict[int, tuple[object, Node]] = {}
        self._values: dict[str, Any] = {}
        self._components: dict[str, str] = {}
        paths: dict[str, Any] = {}
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        where = f"step {self.committed.step}"
        self._document = functools.partial(
            per_process_state.document_of, content.manifest.document, rank, ranks, where
        )
        with native_torch(), about(self.committed):
            tree = tree_of(self._document(taken=()), self._stand_in)
            if isinstance(content, ForeignStep) and isinstance(tree[STATE], dict):
                tree = tree[STATE]  # the keys of the pytree are the program's
            for component, state in _placed(tree, prefix):
                values, its_paths = flatten_state_dict(state)
                if clash := values.keys() & self._values.keys():
                    raise SelectionError(
                        f"prefix: two components would have {min(clash)}; give them other keys"
                    )
                self._values |= values
                self._components |= dict.fromkeys(values, component)
                paths |= its_paths
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
        try:
            tensor = stand_in(node)
        except UnsupportedLeafError:  # of a dtype that torch lacks
            tensor, node = None, {**node, "kind": "numpy"}
        found = object() if tensor is None else tensor
        self._nodes[id(found)] = found, node
        return found

    def read(self, items: Sequence[ReadItem], planned: FlattenedStep, told: set[str]) -> Parts:
        """Returns the parts of leaves for items that were planned for this step or a newer one.

        Raises MismatchError if the newer one has tensors of other shapes or dtypes. Warns if items
        depend on the number of ranks, unless their component is in ``told``; then it is.
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
        taken = {self._components[item.storage_index.fqn] for item in items} - told
        self._document(taken=taken)
        told |= taken
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
            for within, part in parts[node["array"], bounds_of(None, array.shape)]:
                array[within] = part
            leaves[id(found)] = revived(node, array)
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
            (region,) = self._needs(item)
            for within, part in parts[region]:
                target[within].copy_(tensor_of(part, dtype))
            planner.commit_tensor(item, target)
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                value = self._filled(self._values[item.storage_index.fqn], parts)
                if isinstance(planner, LoadPlanner):
                    planner.load_value(item, value)
                else:
                    planner.load_bytes(item, _pickled(value))


def _placed(
    tree: Mapping[str, Any], prefix: str | Mapping[str, str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each component, and its state under the key that the program has for it."""
    if isinstance(prefix, Mapping) and (unknown := prefix.keys() - tree.keys()):
        raise SelectionError(
            f"prefix: expected components of the step, {', '.join(sorted(tree))}; found "
            f"{', '.join(sorted(unknown))}"
        )
    for component, state in tree.items():
        key = component
        if isinstance(prefix, Mapping):
            key = prefix.get(component, component)
        elif prefix:
            key, state = prefix, {component: state}
        yield component, {key: state} if key else state


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
