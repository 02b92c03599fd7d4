"""Which shards of a step in a local tier this host needs, has on its disk, and reads."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec, Sharding

from torchax_ckpt.devices.move_shards import Rounds
from torchax_ckpt.devices.sharding import Local, host_part, spans_hosts
from torchax_ckpt.layout.manifest import Node, leaf_nodes
from torchax_ckpt.state.component import LeafRead
from torchax_ckpt.state.leaf import Spec


def as_saved(reads: Mapping[str, LeafRead], specs: Mapping[str, Any]) -> dict[str, LeafRead]:
    """Returns the reads, each with the sharding of the save on the current mesh, if possible."""
    found = dict(reads)
    for name, read in reads.items():
        now = read.placement
        if name in specs and isinstance(now, NamedSharding):
            # The current mesh may not allow the sharding, and a manifest may contain any value. JAX
            # then raises errors of several classes, some of them private.
            with contextlib.suppress(Exception):
                dims = [tuple(dim) if isinstance(dim, list) else dim for dim in specs[name]]
                then = NamedSharding(now.mesh, PartitionSpec(*dims), memory_kind=now.memory_kind)
                then.shard_shape(read.spec.shape)
                if not then.is_equivalent_to(now, len(read.spec.shape)):
                    found[name] = dataclasses.replace(read, placement=then)
    return found


def of_reads(reads: Mapping[str, LeafRead], document: Mapping[str, Node]) -> dict[str, LeafRead]:
    """Returns reads of this host's part, of the leaves that its step does not hold whole."""
    found, nodes = {}, leaf_nodes(document)
    for name, read in reads.items():
        if spans_hosts(read.placement) and "starts" in nodes.get(name, {}):
            part = host_part(read.placement, read.spec.shape)  # type: ignore[arg-type]
            spec = dataclasses.replace(read.spec, shape=part.shape)
            found[name] = LeafRead(read.name, spec, part.sharding)
    return found


def needed_starts(reads: Mapping[str, LeafRead]) -> dict[str, list[list[int]]]:
    """Returns leaf -> ``starts`` that this host needs, of leaves that are to span hosts."""
    return {
        name: [list(start) for start in host_part(read.placement, read.spec.shape).starts]
        for name, read in reads.items()
        if isinstance(read.placement, Sharding) and spans_hosts(read.placement)
    }


def stored_starts(
    reads: Mapping[str, LeafRead], document: Mapping[str, Node]
) -> dict[str, list[list[int]]]:
    """Returns the starts that this host's copy of the step has, as ``needed_starts`` does.

    The stored starts differ from the needed ones if the host had another position in the mesh at
    the save. Leaves stored whole satisfy any request. Raises ValueError for a part that does not
    fit the needed one.
    """
    found, nodes = needed_starts(reads), leaf_nodes(document)
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


def on_host(document: Mapping[str, Node], names: Iterable[str]) -> dict[str, LeafRead]:
    """Returns reads of leaves into host memory, from which they are sent to other hosts."""
    nodes = leaf_nodes(document)
    return {n: LeafRead(n, Spec.of_node(nodes[n]), Local.HOST) for n in names if n in nodes}


Runs = list[list[tuple[int, int, int]]]
"""For each permute, runs of (first sender, first receiver, number); both indices rise by one."""


def routes(needs: Sequence[str], holds: Sequence[str | None], slices: Sequence[int]) -> Rounds:
    """Returns permutes that, executed one after another, give each process the part that it needs.

    A permute is a tuple of pairs (sender, receiver), with each process at most once on each side. A
    process that has the part that it needs receives no other, so no needed part is lost. The
    arguments have a value for each process; the connection to another slice is slower. Raises
    LookupError if no process has a needed part.
    """
    if not set(needs) <= set(holds):
        raise LookupError(
            "no process has a part of the state that another process needs; restore another step"
        )
    holds, rounds = list(holds), []
    while lacking := [i for i, part in enumerate(needs) if holds[i] != part]:
        free: dict[str | None, list[int]] = collections.defaultdict(list)
        for i, part in enumerate(holds):
            free[part].append(i)
        pairs: list[tuple[int, int]] = []
        for is_near in (True, False):
            for i in lacking:
                senders = [j for j in free[needs[i]] if not is_near or slices[j] == slices[i]]
                if senders and holds[i] != needs[i]:
                    free[needs[i]].remove(senders[0])
                    pairs.append((senders[0], i))
                    holds[i] = needs[i]
        rounds.append(tuple(pairs))
    return tuple(rounds)


def runs(rounds: Rounds) -> Runs:
    """Returns the permutes as runs of pairs, for a short message: a slice's parts are one run."""
    found: Runs = []
    for pairs in rounds:
        found.append([])
        for sender, receiver in pairs:
            if found[-1]:
                first, to, number = found[-1][-1]
                if (sender, receiver) == (first + number, to + number):
                    found[-1][-1] = first, to, number + 1
                    continue
            found[-1].append((sender, receiver, 1))
    return found


def rounds_of(found: Runs) -> Rounds:
    """Returns the permutes that ``runs`` has described."""
    return tuple(
        tuple((first + i, to + i) for first, to, number in permute for i in range(number))
        for permute in found
    )


Answer = tuple[int | None, list[int], bool]
"""For one process: who sends its state (None: nobody), whose states it sends, and whether any
process sends a state, so that all processes report again whether they lack theirs."""


class StateSenders:
    """Decides, on process 0, who sends which process its state; ask until none lacks its own."""

    def __init__(self, hosts: Sequence[Sequence[int]], lacking: Sequence[bool]) -> None:
        self.lacking = lacking
        self._hosts = hosts  # for each process, those to ask for its state, in this order
        self._senders: list[int | None] = [None] * len(hosts)
        self._damaged: set[int] = set()

    @classmethod
    def of_equal(cls, has_copy: Iterable[bool]) -> StateSenders:
        """Returns the plan if all processes have equal states, so that each copy has all."""
        lacking = [not has for has in has_copy]
        hosts = [index for index, lacks in enumerate(lacking) if not lacks]
        return cls([hosts] * len(lacking), lacking)

    @classmethod
    def of_states(cls, states: Sequence[Sequence[int]]) -> StateSenders:
        """Returns the plan, given for each process those whose states its host has."""
        hosts: list[list[int]] = [[] for _ in states]
        for host, indices in enumerate(states):
            for index in indices:
                if index < len(hosts):  # a manifest may name any process
                    hosts[index].append(host)
        return cls(hosts, [index not in with_state for index, with_state in enumerate(hosts)])

    def answers(self, lacking: Sequence[int]) -> list[Answer]:
        """Returns each process's answer; LookupError, with an index, if no host has that state.

        A process that still lacks its state was sent a damaged one, so the sender ignores its copy.
        """
        for sender, lacks in zip(self._senders, lacking, strict=True):
            if lacks and sender is not None:
                self._damaged.add(sender)
        posts: list[list[int]] = [[] for _ in lacking]
        self._senders = [None] * len(lacking)
        for index, lacks in enumerate(lacking):
            if lacks:
                sender = next((i for i in self._hosts[index] if i not in self._damaged), None)
                if sender is None:
                    raise LookupError(index)
                self._senders[index] = sender
                posts[sender].append(index)
        is_any = any(lacking)
        return [
            (sender, indices, is_any) for sender, indices in zip(self._senders, posts, strict=True)
        ]
