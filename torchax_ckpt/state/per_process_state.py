"""Owns what each process of a run has for itself: random state, the loader's place, users' objects.

What lies on devices of several processes is one state. Everything else is on every process: of
modules, optimizers and schedulers it is the same, and that of process 0 is saved; of the components
named here it differs, and is saved for each process. A process whose state is that of process 0
costs nothing. In the document the others stand under ``processes``:

    {"dict": [["1", {"dict": [["rng", node], ...]}], ["2", null], ...]}

one entry for each process from 1 on, null for one whose state is that of process 0. Their leaves
are named as those of process 0, after ``processes/1/``.

Restored by as many processes, each gets its own. By fewer or more, process i gets that of process
i modulo their number, with a warning.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from torchax_ckpt.layout.manifest import Node, array_nodes
from torchax_ckpt.layout.names import PROCESSES, of_process
from torchax_ckpt.runtime import user_warnings
from torchax_ckpt.state import node_checks
from torchax_ckpt.state.component import Captured
from torchax_ckpt.state.leaf import Array

COMPONENTS = ("dataloader", "stateful", "rng")


@dataclasses.dataclass(frozen=True)
class PerProcessState:
    """What one process has for itself, at one moment.

    Attributes:
      nodes: component -> node.
      leaves: name -> array of this process: on the host, or on devices of its own.
    """

    nodes: Mapping[str, Node]
    leaves: Mapping[str, Any]

    def to_bytes(self) -> bytes:
        """For another process; waits for devices. Equal for equal states."""
        hosts = {name: np.asarray(leaf) for name, leaf in self.leaves.items()}
        looks = [[name, host.dtype.name, host.shape] for name, host in hosts.items()]
        header = json.dumps([self.nodes, looks]).encode()
        return b"".join([len(header).to_bytes(8), header, *(h.tobytes() for h in hosts.values())])

    @classmethod
    def of_bytes(cls, sent: bytes) -> PerProcessState:
        """What ``to_bytes`` gave; the leaves are on the host."""
        start = 8 + int.from_bytes(sent[:8])
        nodes, looks = json.loads(sent[8:start])
        leaves = {}
        for name, dtype, shape in looks:
            count = math.prod(shape)
            host = np.frombuffer(sent, np.dtype(dtype), count, start).reshape(shape)
            leaves[name] = host
            start += host.nbytes
        return cls(nodes, leaves)


def split(captured: Mapping[str, Captured]) -> tuple[list[str], list[Array], PerProcessState]:
    """Names and arrays that all processes save together, and what is this one's."""
    shared: dict[str, Array] = {}
    own: dict[str, Array] = {}
    for component, part in captured.items():
        for name, array in part.by_name().items():
            if component not in COMPONENTS:
                shared[name] = array
            elif not isinstance(array, jax.Array):
                own[name] = array
            elif array.is_fully_addressable:
                own[name] = jnp.copy(array)  # a later step may donate it
            else:
                shared[name] = array
    nodes = {name: part.form.node for name, part in captured.items() if name in COMPONENTS}
    return list(shared), list(shared.values()), PerProcessState(nodes, own)


def joined(sent: Sequence[bytes]) -> tuple[dict[str, Node], dict[str, np.ndarray]]:
    """What all processes have for themselves: components for the document, and host leaves.

    Args:
      sent: by process, what ``PerProcessState.to_bytes`` gave.
    """
    first = PerProcessState.of_bytes(sent[0])
    leaves: dict[str, np.ndarray] = dict(first.leaves)
    others: list[list[Any]] = []
    for index, message in enumerate(sent[1:], start=1):
        own = PerProcessState.of_bytes(message) if message != sent[0] else None
        node = None
        if own is not None:
            nodes = {name: _renamed(node, own, index) for name, node in own.nodes.items()}
            node = {"dict": [list(pair) for pair in nodes.items()]}
            leaves.update({of_process(index, name): leaf for name, leaf in own.leaves.items()})
        others.append([str(index), node])
    document = dict(first.nodes)
    if any(node is not None for _, node in others):
        document[PROCESSES] = {"dict": others}
    return document, leaves


def _renamed(node: Node, own: PerProcessState, index: int) -> Node:
    renamed = copy.deepcopy(node)
    for child in array_nodes(renamed):
        if child["array"] in own.leaves:
            child["array"] = of_process(index, child["array"])
    return renamed


def count_of(document: Mapping[str, Node]) -> int | None:
    """How many processes with states of their own have saved it; None for one state for all."""
    if PROCESSES not in document:
        return None
    return 1 + len(node_checks.fields(document[PROCESSES], PROCESSES))


class Place(Protocol):
    """Which process this is, of how many."""

    index: int
    count: int


def document_of(document: Mapping[str, Node], place: Place, where: str) -> Mapping[str, Node]:
    """The document as one process restores it.

    Args:
      document: of the step.
      place: the process.
      where: the step, for messages.
    """
    index, count = place.index, place.count
    saved = count_of(document)
    if saved is None:
        return document
    others = node_checks.fields(document[PROCESSES], PROCESSES)
    if others.keys() != {str(i) for i in range(1, saved)}:
        raise node_checks.corrupt(
            PROCESSES, f"processes 1 to {saved - 1}", f"{sorted(others)!r:.80}"
        )
    differing = [
        node_checks.fields(node, PROCESSES) for node in others.values() if node is not None
    ]
    if saved != count and index == 0:
        named = ", ".join(sorted(set().union(*differing)))
        lost = f"those of processes {count} to {saved - 1} are left out"
        twice = f"processes {saved} to {count - 1} go on as others do, not independently"
        user_warnings.warn(
            f"{where} was saved by {saved} processes and is restored by {count}. What they had for "
            f"themselves, {named}, goes to the process of the same index, modulo {saved}: "
            f"{lost if count < saved else twice}.",
            stacklevel=2,
        )
    mine = others.get(str(index % saved))
    own = {} if mine is None else node_checks.fields(mine, PROCESSES)
    return {name: own.get(name, node) for name, node in document.items() if name != PROCESSES}
