"""Which shards of a step in a local tier this host needs, has on its disk, and reads."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec, Sharding

from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.saving.host_parts import nodes_of
from torchax_ckpt.snapshot.sharding import Local, host_part, spans_hosts
from torchax_ckpt.state.component import Read
from torchax_ckpt.state.leaf import Spec


def as_saved(reads: Mapping[str, Read], specs: Mapping[str, Any]) -> dict[str, Read]:
    """Returns the reads, each with the sharding of the save on the current mesh, if possible."""
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
    """Returns reads of this host's part, of the leaves that its step does not hold whole."""
    found, nodes = {}, nodes_of(document)
    for name, read in reads.items():
        if spans_hosts(read.placement) and "starts" in nodes.get(name, {}):
            part = host_part(read.placement, read.spec.shape)  # type: ignore[arg-type]
            spec = dataclasses.replace(read.spec, shape=part.shape)
            found[name] = Read(read.name, spec, part.sharding)
    return found


def needed_starts(reads: Mapping[str, Read]) -> dict[str, list[list[int]]]:
    """Returns the field ``starts`` that this host needs, for each leaf that is to span hosts.

    Raises ValueError if a sharding has no mesh, or this host's devices are no block of it.
    """
    return {
        name: [list(start) for start in host_part(read.placement, read.spec.shape).starts]
        for name, read in reads.items()
        if isinstance(read.placement, Sharding) and spans_hosts(read.placement)
    }


def stored_starts(
    reads: Mapping[str, Read], document: Mapping[str, Node]
) -> dict[str, list[list[int]]]:
    """Returns the starts that this host's copy of the step has, in the form of ``needed_starts``.

    They differ if the host had another position in the mesh at the save. Leaves stored whole
    satisfy any request. Raises ValueError if a part does not fit the one that is needed.
    """
    found, nodes = needed_starts(reads), nodes_of(document)
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
    """Returns each device's position in the grid that the host's shards of a leaf form."""
    try:
        along = [sorted(set(dim)) for dim in zip(*starts, strict=True)]
        return [[dim.index(at) for dim, at in zip(along, s, strict=True)] for s in starts]
    except TypeError as error:  # a manifest may contain any value
        raise ValueError(f"expected lists of shard starts, found {starts!r:.80}") from error


def on_host(document: Mapping[str, Node], names: Iterable[str]) -> dict[str, Read]:
    """Returns reads of leaves into host memory, from which they are sent to other hosts."""
    nodes = nodes_of(document)
    return {n: Read(n, Spec.of_node(nodes[n]), Local.HOST) for n in names if n in nodes}
