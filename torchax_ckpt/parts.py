"""Owns the parts of leaves in a step that one host has saved for itself: what it says of them.

Such a step holds what the host's devices hold. Where that is not the whole leaf, its node in the
manifest has the shape of the part, and three fields more:

    whole     the shape of the leaf
    starts    where in it the shard of each device begins, in the order of the host's own mesh
    spec      over which mesh axes each of its dims was sharded
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from torchax_ckpt.layout.manifest import Node, array_nodes
from torchax_ckpt.layout.plan import Plan
from torchax_ckpt.sharding import Local, host_part, spans_hosts
from torchax_ckpt.snapshot import Array
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
            if part.shape != array.shape:
                node["whole"], node["shape"] = node["shape"], list(part.shape[is_member:])
                node["starts"] = [list(start[is_member:]) for start in part.starts]
                node["spec"] = [
                    list(dim) if isinstance(dim, tuple) else dim
                    for dim in part.sharding.spec[is_member:]
                ]
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
    """How the leaves were sharded of which hosts hold parts."""
    return {name: node["spec"] for name, node in _nodes(document).items() if "spec" in node}


def as_saved(reads: Mapping[str, Read], specs: Mapping[str, Any]) -> dict[str, Read]:
    """The reads, onto the shardings that leaves had when they were saved, on the mesh of now."""
    found = dict(reads)
    for name, read in reads.items():
        if name in specs and isinstance(read.placement, NamedSharding):
            dims = [tuple(dim) if isinstance(dim, list) else dim for dim in specs[name]]
            with contextlib.suppress(ValueError):  # another mesh, on which that cannot be
                sharding = NamedSharding(read.placement.mesh, PartitionSpec(*dims))
                sharding.shard_shape(read.spec.shape)
                found[name] = dataclasses.replace(read, placement=sharding)
    return found


def of_reads(reads: Mapping[str, Read], document: Mapping[str, Node]) -> dict[str, Read]:
    """What this host reads of its own step, where that holds a part of a leaf."""
    found, parts_held = {}, held(document)
    for name, read in reads.items():
        if spans_hosts(read.placement) and parts_held.get(name) is not None:
            part = host_part(read.placement, read.spec.shape)  # type: ignore[arg-type]
            spec = dataclasses.replace(read.spec, shape=part.shape)
            found[name] = Read(read.name, spec, part.sharding)
    return found


def needed(reads: Mapping[str, Read]) -> dict[str, Any]:
    """What tells the parts that this host needs from those that others need, by leaf."""
    found: dict[str, Any] = {}
    for name, read in reads.items():
        if spans_hosts(read.placement):
            part = host_part(read.placement, read.spec.shape)  # type: ignore[arg-type]
            is_whole = part.shape == read.spec.shape
            found[name] = None if is_whole else [list(start) for start in part.starts]
    return found


def held(document: Mapping[str, Node]) -> dict[str, Any]:
    """Which part of each leaf a host's step holds, as ``needed`` says it; None for the whole."""
    return {name: node.get("starts") for name, node in _nodes(document).items()}


def on_host(document: Mapping[str, Node], names: Iterable[str]) -> dict[str, Read]:
    """Reads of leaves, as far as the step has them, to be sent to another host."""
    nodes = _nodes(document)
    return {n: Read(n, Spec.of_node(nodes[n]), Local.HOST) for n in names if n in nodes}


def _nodes(document: Mapping[str, Node]) -> dict[str, Mapping[str, Any]]:
    return {node["array"]: node for part in document.values() for node in array_nodes(part)}
