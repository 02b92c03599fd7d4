"""Owns the parts of leaves in a step that one host has saved for itself: what it says of them.

Such a step holds what the host's devices hold. The node of a leaf that lies on several hosts has a
field more in the manifest, and, where the host does not hold the whole, the shape of the part and
another two:

    spec      over which mesh axes each of its dims was sharded
    whole     the shape of the leaf
    starts    where in it the shard of each device begins, in the order of the host's own mesh
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from torchax_ckpt.layout.manifest import Node, array_nodes
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.snapshot.sharding import Local, host_part, spans_hosts
from torchax_ckpt.snapshot.stacking import Array
from torchax_ckpt.state.component import Read
from torchax_ckpt.state.leaf import Spec


def described(
    document: Mapping[str, Node], plan: Plan, arrays: Mapping[str, Array]
) -> Mapping[str, Node]:
    """The document of a step that holds this host's parts of these stored arrays."""
    document = copy.deepcopy(dict(document))
    located = plan.locate()
    for component in document.values():
        for node in array_nodes(component):
            stored, _ = located.get(node["array"], (node["array"], 0))
            array = arrays.get(stored)
            if not isinstance(array, jax.Array) or array.is_fully_addressable:
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


def whole(document: Mapping[str, Node]) -> Mapping[str, Node]:
    """The document as it would be had all hosts saved together."""
    document = copy.deepcopy(dict(document))
    for component in document.values():
        for node in array_nodes(component):
            node["shape"] = node.pop("whole", node["shape"])
            node.pop("starts", None)
            node.pop("spec", None)
    return document


def specs(document: Mapping[str, Node]) -> dict[str, Any]:
    """How the leaves were sharded that lay on several hosts."""
    return {name: node["spec"] for name, node in _nodes(document).items() if "spec" in node}


def as_saved(reads: Mapping[str, Read], specs: Mapping[str, Any]) -> dict[str, Read]:
    """The reads, onto the shardings that leaves had when they were saved, on the mesh of now."""
    found = dict(reads)
    for name, read in reads.items():
        now = read.placement
        if name in specs and isinstance(now, NamedSharding):
            # Another mesh, on which that cannot be; or no spec: the manifest of a step is data.
            with contextlib.suppress(ValueError, TypeError):
                dims = [tuple(dim) if isinstance(dim, list) else dim for dim in specs[name]]
                then = NamedSharding(now.mesh, PartitionSpec(*dims), memory_kind=now.memory_kind)
                then.shard_shape(read.spec.shape)
                if not then.is_equivalent_to(now, len(read.spec.shape)):
                    found[name] = dataclasses.replace(read, placement=then)
    return found


def of_reads(reads: Mapping[str, Read], document: Mapping[str, Node]) -> dict[str, Read]:
    """What this host reads of its own step, where that holds a part of a leaf."""
    found, nodes = {}, _nodes(document)
    for name, read in reads.items():
        if spans_hosts(read.placement) and "starts" in nodes.get(name, {}):
            part = host_part(read.placement, read.spec.shape)  # type: ignore[arg-type]
            spec = dataclasses.replace(read.spec, shape=part.shape)
            found[name] = Read(read.name, spec, part.sharding)
    return found


def needed(reads: Mapping[str, Read]) -> dict[str, list[list[int]]]:
    """By leaf that lies on several hosts: where the shard of each of this host's devices begins.

    Raises:
      ValueError: a leaf lies on no mesh, or this host's devices are no block of it.
    """
    return {
        name: [list(start) for start in host_part(read.placement, read.spec.shape).starts]
        for name, read in reads.items()
        if isinstance(read.placement, Sharding) and spans_hosts(read.placement)
    }


def held(reads: Mapping[str, Read], document: Mapping[str, Node]) -> dict[str, list[list[int]]]:
    """Which parts of these leaves a host's step holds, as ``needed`` says it.

    They may be those of another place of the mesh. Of what it holds whole, it holds what is needed.

    Raises:
      ValueError: a part is of another size, or does not lie on this host's devices as one of now
        would.
    """
    found, nodes = needed(reads), _nodes(document)
    for name in reads:
        starts = nodes.get(name, {}).get("starts")
        if starts is None:
            continue
        if name not in found:
            raise ValueError(f"{name} is a part, and it is wanted whole")
        part = host_part(reads[name].placement, reads[name].spec.shape)  # type: ignore[arg-type]
        is_alike = list(part.shape) == nodes[name]["shape"]
        if not is_alike or _blocks(starts) != _blocks(found[name]):
            raise ValueError(f"{name} is cut otherwise than on this host now")
        found[name] = starts
    return found


def _blocks(starts: Any) -> list[list[int]]:
    """Which block of a host's part each of its devices has, counted along each dim."""
    try:
        along = [sorted(set(dim)) for dim in zip(*starts, strict=True)]
        return [[dim.index(at) for dim, at in zip(along, s, strict=True)] for s in starts]
    except TypeError as error:  # the manifest of a step is data
        raise ValueError(f"expected where shards begin, found {starts!r:.80}") from error


def on_host(document: Mapping[str, Node], names: Iterable[str]) -> dict[str, Read]:
    """Reads of leaves, as far as the step has them, to be sent to another host."""
    nodes = _nodes(document)
    return {n: Read(n, Spec.of_node(nodes[n]), Local.HOST) for n in names if n in nodes}


def _nodes(document: Mapping[str, Node]) -> dict[str, Mapping[str, Any]]:
    return {node["array"]: node for part in document.values() for node in array_nodes(part)}
