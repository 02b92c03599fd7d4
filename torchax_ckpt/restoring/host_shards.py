"""One host's parts of leaves: how a step in a local tier describes them.

Such a step holds the shards of one host's devices. In its manifest the node of a leaf that lies on
several hosts has the further field ``spec``. If the host does not hold the whole leaf, the node's
shape is that of the host's part, and it has the fields ``whole`` and ``starts`` too:

    spec      the mesh axes over which each dim of the leaf was sharded
    whole     the shape of the leaf
    starts    for each device, in the order of the host's own mesh, the index in the leaf at which
              the device's shard begins
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
    """Returns the document of a step that holds this host's parts of the stored arrays.

    Args:
      document: component -> node, for the whole leaves.
      plan: which stored array holds each leaf.
      arrays: stored name -> array over all hosts.
    """
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
    """Returns the document as a save by all hosts together would write it."""
    document = copy.deepcopy(dict(document))
    for component in document.values():
        for node in array_nodes(component):
            node["shape"] = node.pop("whole", node["shape"])
            node.pop("starts", None)
            node.pop("spec", None)
    return document


def specs(document: Mapping[str, Node]) -> dict[str, Any]:
    """Returns leaf -> field ``spec``, for the leaves that lay on several hosts."""
    return {name: node["spec"] for name, node in _nodes(document).items() if "spec" in node}


def as_saved(reads: Mapping[str, Read], specs: Mapping[str, Any]) -> dict[str, Read]:
    """Returns the reads with the shardings that the leaves had when saved, on the current mesh."""
    found = dict(reads)
    for name, read in reads.items():
        now = read.placement
        if name in specs and isinstance(now, NamedSharding):
            # The current mesh may not allow the sharding, and the manifest may hold anything.
            with contextlib.suppress(ValueError, TypeError):
                dims = [tuple(dim) if isinstance(dim, list) else dim for dim in specs[name]]
                then = NamedSharding(now.mesh, PartitionSpec(*dims), memory_kind=now.memory_kind)
                then.shard_shape(read.spec.shape)
                if not then.is_equivalent_to(now, len(read.spec.shape)):
                    found[name] = dataclasses.replace(read, placement=then)
    return found


def of_reads(reads: Mapping[str, Read], document: Mapping[str, Node]) -> dict[str, Read]:
    """Returns the reads of this host's own step, for the leaves of which it holds a part."""
    found, nodes = {}, _nodes(document)
    for name, read in reads.items():
        if spans_hosts(read.placement) and "starts" in nodes.get(name, {}):
            part = host_part(read.placement, read.spec.shape)  # type: ignore[arg-type]
            spec = dataclasses.replace(read.spec, shape=part.shape)
            found[name] = Read(read.name, spec, part.sharding)
    return found


def needed_starts(reads: Mapping[str, Read]) -> dict[str, list[list[int]]]:
    """Returns the starts of the shards that this host's devices need.

    The result maps each leaf that lies on several hosts to the start of each device's shard, in the
    form of the field ``starts``.

    Raises:
      ValueError: a leaf has no mesh, or this host's devices do not form a block of the mesh.
    """
    return {
        name: [list(start) for start in host_part(read.placement, read.spec.shape).starts]
        for name, read in reads.items()
        if isinstance(read.placement, Sharding) and spans_hosts(read.placement)
    }


def stored_starts(
    reads: Mapping[str, Read], document: Mapping[str, Node]
) -> dict[str, list[list[int]]]:
    """Returns the starts of the shards that a host's step holds, in the form of ``needed_starts``.

    They may belong to another position of the mesh. Leaves stored whole satisfy any request, so
    they have the starts that are needed.

    Raises:
      ValueError: a part has another size than the host's current part, or is divided differently
        among its devices; or a whole leaf is requested, and the step holds a part of it.
    """
    found, nodes = needed_starts(reads), _nodes(document)
    for name in reads:
        starts = nodes.get(name, {}).get("starts")
        if starts is None:
            continue
        if name not in found:
            raise ValueError(f"{name} is one host's part, and the whole leaf is requested")
        part = host_part(reads[name].placement, reads[name].spec.shape)  # type: ignore[arg-type]
        is_alike = list(part.shape) == nodes[name]["shape"]
        if not is_alike or _blocks(starts) != _blocks(found[name]):
            raise ValueError(f"{name} is divided differently than among this host's devices now")
        found[name] = starts
    return found


def _blocks(starts: Any) -> list[list[int]]:
    """Returns, for each device of a host, the position of its block in the host's part."""
    try:
        along = [sorted(set(dim)) for dim in zip(*starts, strict=True)]
        return [[dim.index(at) for dim, at in zip(along, s, strict=True)] for s in starts]
    except TypeError as error:  # the manifest may hold anything
        raise ValueError(f"expected lists of shard starts, found {starts!r:.80}") from error


def on_host(document: Mapping[str, Node], names: Iterable[str]) -> dict[str, Read]:
    """Returns reads onto the host for those of the named leaves that the step has.

    The host reads them to send them to another host.
    """
    nodes = _nodes(document)
    return {n: Read(n, Spec.of_node(nodes[n]), Local.HOST) for n in names if n in nodes}


def _nodes(document: Mapping[str, Node]) -> dict[str, Mapping[str, Any]]:
    return {node["array"]: node for part in document.values() for node in array_nodes(part)}
