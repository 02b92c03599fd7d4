"""How the manifest of a step in a local tier describes one host's parts of leaves.

Such a step holds only the shards of one host's devices. The node of a leaf that spanned several
hosts has the field ``spec``. If the host had only a part of the leaf, the node's shape is that of
this part, and the node has two more fields, ``whole`` and ``starts``:

    spec      the mesh axes over which each dim of the leaf was sharded
    whole     the shape of the leaf
    starts    for each device, in the order of the host's block of the mesh, the index in the leaf
              at which the device's shard begins
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchax_ckpt.devices.sharding import host_part
from torchax_ckpt.layout.manifest import Node, array_nodes, leaf_nodes
from torchax_ckpt.layout.storage_plan import Plan
from torchax_ckpt.snapshot.snapshotter import Stored


def described(
    document: Mapping[str, Node], plan: Plan, arrays: Mapping[str, Stored]
) -> Mapping[str, Node]:
    """Returns the document with nodes that describe this host's parts of the global ``arrays``."""
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


def digest_of_parts(document: Mapping[str, Node]) -> str:
    """Returns a digest of the parts in what ``described`` has returned."""
    return digest({name: node.get("starts") for name, node in leaf_nodes(document).items()})


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
    return {name: node["spec"] for name, node in leaf_nodes(document).items() if "spec" in node}
