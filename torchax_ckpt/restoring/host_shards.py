"""How the manifest of a step in a local tier describes one host's parts of leaves.

A step in a local tier holds only the shards of one host's devices. In the manifest of a step in a
local tier, the node of a leaf that spanned several hosts has the additional field ``spec``. If the
host had only a part of the leaf, the node's shape is that of this part, and the node has two more
fields, ``whole`` and ``starts``:

    spec      the mesh axes over which each dim of the leaf was sharded
    whole     the shape of the leaf
    starts    for each device, in the order of the host's block of the mesh, the index in the leaf
              at which the device's shard begins
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from torchax_ckpt.layout.manifest import Node, array_nodes
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.snapshot.sharding import Local, host_part, spans_hosts
from torchax_ckpt.snapshot.snapshotter import Stored
from torchax_ckpt.state.component import Read
from torchax_ckpt.state.leaf import Spec


def described(
    document: Mapping[str, Node], plan: Plan, arrays: Mapping[str, Stored]
) -> Mapping[str, Node]:
    """Returns a copy of the document in which nodes describe this host's parts of the leaves.

    Args:
      document: component -> node; the nodes describe whole leaves.
      plan: which stored array holds each leaf.
      arrays: stored name -> array over all hosts.
    """
    document = copy.deepcopy(dict(document))
    located = plan.locate()
    for component in document.values():
        for node in array_nodes(component):
            stored, _ = located.get(node["array"], (node["array"], 0))
            array = arrays.get(stored)
            if array is None or isinstance(array, np.ndarray) or array.is_fully_addressable:
                continue
            is_member = node["array"] in located
            part = host_part(array.sharding, array.shape)
            node["spec"] = [
                list(dim) if isinstance(dim, tuple) else dim
                for dim in part.sharding.spec[is_member:]
            ]
            if part.shape != array.shape:
                node["whole"], node["shape"] = node["shape"], list(part.shape[is_member:])
                node["starts"] = [list(start[is_member:]) for start in part.starts]
    return document


def parts(document: Mapping[str, Node]) -> str:
    """Returns a digest of the parts of leaves that this host has; equal for hosts of equal parts.

    Args:
      document: a result of ``described``.
    """
    return digest({name: node.get("starts") for name, node in _nodes(document).items()})


def digest(content: Any) -> str:
    """Returns the digest of JSON content; equal contents have equal digests."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def whole(document: Mapping[str, Node]) -> Mapping[str, Node]:
    """Returns the document with nodes that describe whole leaves; inverse of ``described``."""
    document = copy.deepcopy(dict(document))
    for component in document.values():
        for node in array_nodes(component):
            node["shape"] = node.pop("whole", node["shape"])
            node.pop("starts", None)
            node.pop("spec", None)
    return document


def specs(document: Mapping[str, Node]) -> dict[str, Any]:
    """Returns leaf name -> field ``spec``, for leaves that spanned several hosts at the save."""
    return {name: node["spec"] for name, node in _nodes(document).items() if "spec" in node}


def as_saved(reads: Mapping[str, Read], specs: Mapping[str, Any]) -> dict[str, Read]:
    """Returns the reads, with each leaf's sharding at the save in place of the requested sharding.

    A returned sharding uses the current mesh, and shards each dim over the same mesh axes as at the
    save. A read keeps the requested sharding if ``specs`` lacks the leaf, or if the current mesh
    does not allow the sharding that the leaf had at the save.
    """
    found = dict(reads)
    for name, read in reads.items():
        now = read.placement
        if name in specs and isinstance(now, NamedSharding):
            # The current mesh may not allow the sharding, and a manifest may contain any value.
            with contextlib.suppress(ValueError, TypeError):
                dims = [tuple(dim) if isinstance(dim, list) else dim for dim in specs[name]]
                if not _are_distinct(dims):  # JAX raises an error of a private class
                    continue
                then = NamedSharding(now.mesh, PartitionSpec(*dims), memory_kind=now.memory_kind)
                then.shard_shape(read.spec.shape)
                if not then.is_equivalent_to(now, len(read.spec.shape)):
                    found[name] = dataclasses.replace(read, placement=then)
    return found


def _are_distinct(dims: Iterable[Any]) -> bool:
    """Returns whether no mesh axis shards two dims."""
    parts = [dim if isinstance(dim, tuple) else (dim,) for dim in dims if dim is not None]
    axes = [axis for part in parts for axis in part]
    return len(set(axes)) == len(axes)


def of_reads(reads: Mapping[str, Read], document: Mapping[str, Node]) -> dict[str, Read]:
    """Returns, for each leaf that this host's step does not hold whole, a read of the host's part.

    Args:
      reads: name -> the read of the whole leaf.
      document: the document of this host's step.
    """
    found, nodes = {}, _nodes(document)
    for name, read in reads.items():
        if spans_hosts(read.placement) and "starts" in nodes.get(name, {}):
            part = host_part(read.placement, read.spec.shape)  # type: ignore[arg-type]
            spec = dataclasses.replace(read.spec, shape=part.shape)
            found[name] = Read(read.name, spec, part.sharding)
    return found


def needed_starts(reads: Mapping[str, Read]) -> dict[str, list[list[int]]]:
    """Returns the start indices of the shards that this host's devices need.

    The result maps the name of each leaf that is to span several hosts to the start index of each
    device's shard, in the form of the manifest field ``starts``.

    Raises:
      ValueError: a leaf's sharding has no mesh, or this host's devices do not form a block of the
        mesh.
    """
    return {
        name: [list(start) for start in host_part(read.placement, read.spec.shape).starts]
        for name, read in reads.items()
        if isinstance(read.placement, Sharding) and spans_hosts(read.placement)
    }


def stored_starts(
    reads: Mapping[str, Read], document: Mapping[str, Node]
) -> dict[str, list[list[int]]]:
    """Returns the start indices of the shards that this host's copy of the step holds.

    The result has the form of the result of ``needed_starts``. If the host had another position in
    the mesh at the save, the stored start indices differ from the needed start indices. For a leaf
    that is stored whole, the result repeats the needed start indices, because a whole leaf
    satisfies any request.

    Raises:
      ValueError: a stored part has another shape than the part that this host needs, or is divided
        differently among the host's devices; or a whole leaf is requested, and the step has only a
        part of it.
    """
    found, nodes = needed_starts(reads), _nodes(document)
    for name in reads:
        starts = nodes.get(name, {}).get("starts")
        if starts is None:
            continue
        if name not in found:
            raise ValueError(
                f"{name}: expected the whole leaf in this host's copy of the step, found one "
                "host's part of the leaf. Read the step from the durable tier (tier='durable')"
            )
        part = host_part(reads[name].placement, reads[name].spec.shape)  # type: ignore[arg-type]
        is_alike = list(part.shape) == nodes[name]["shape"]
        if not is_alike or _blocks(starts) != _blocks(found[name]):
            raise ValueError(
                f"{name}: expected the part of the leaf that this host's devices need, found in "
                "this host's copy of the step a part that has another shape, or that is divided "
                "differently among the devices. Use the mesh with which the step was saved, or the "
                "durable tier (tier='durable')"
            )
        found[name] = starts
    return found


def _blocks(starts: Any) -> list[list[int]]:
    """Returns, for each device of a host, the position of the device's shard in a grid.

    The host's shards of one leaf form this grid. A position has one index for each dim.

    Args:
      starts: for each device, the index in the leaf at which the device's shard begins.
    """
    try:
        along = [sorted(set(dim)) for dim in zip(*starts, strict=True)]
        return [[dim.index(at) for dim, at in zip(along, s, strict=True)] for s in starts]
    except TypeError as error:  # a manifest may contain any value
        raise ValueError(f"expected lists of shard starts, found {starts!r:.80}") from error


def on_host(document: Mapping[str, Node], names: Iterable[str]) -> dict[str, Read]:
    """Returns requests to read the leaves that ``names`` lists into host memory.

    A host reads leaves into host memory in order to send them to other hosts.
    """
    nodes = _nodes(document)
    return {n: Read(n, Spec.of_node(nodes[n]), Local.HOST) for n in names if n in nodes}


def _nodes(document: Mapping[str, Node]) -> dict[str, Mapping[str, Any]]:
    return {node["array"]: node for part in document.values() for node in array_nodes(part)}
