"""Saves and restores per-process state: state that differs between the processes of a run.

All processes together save the arrays that lie on devices of several processes. State that does not
lie on devices of several processes is local: each process has its own version of that state. The
local state of modules, optimizers and schedulers is equal on all processes, and process 0 saves it.
The local state of the components in ``COMPONENTS`` (data loaders, users' objects and random state)
differs between processes and is called per-process state. Each process sends its per-process state
to process 0, which stores it unless it equals the per-process state of process 0. The document (the
nodes of all components) has the per-process states of processes 1, 2, ... under the key
``processes``; null means that a process has the same state as process 0:

    {"dict": [["1", {"dict": [["rng", node], ...]}], ["2", null], ...]}

The leaves of process 1 have the names of process 0's leaves, prefixed with ``processes/1/``.

If a step is restored by as many processes as saved it, each process gets the state that it saved.
If n processes saved a step and another number of processes restores it, process i gets the state
that process i modulo n saved, and process 0 emits a warning.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from torchax_ckpt.layout.manifest import Node, array_nodes
from torchax_ckpt.layout.names import PROCESSES, of_process
from torchax_ckpt.runtime import user_warnings
from torchax_ckpt.snapshot.device_programs import copied
from torchax_ckpt.state import node_checks
from torchax_ckpt.state.component import Captured
from torchax_ckpt.state.leaf import Array

COMPONENTS = ("dataloader", "stateful", "rng")


@dataclasses.dataclass(frozen=True)
class PerProcessState:
    """The per-process state of one process at one moment; see the module's docstring.

    Attributes:
      nodes: component -> node.
      leaves: name -> array, on the host or on devices of this process alone.
    """

    nodes: Mapping[str, Node]
    leaves: Mapping[str, Any]

    def to_bytes(self) -> bytes:
        """Serializes the state, to send it to process 0; first copies device arrays to the host.

        Equal states give equal bytes.
        """
        hosts = {name: np.asarray(leaf) for name, leaf in self.leaves.items()}
        descriptions = [[name, host.dtype.name, host.shape] for name, host in hosts.items()]
        header = json.dumps([self.nodes, descriptions]).encode()
        return b"".join([len(header).to_bytes(8), header, *(h.tobytes() for h in hosts.values())])

    @classmethod
    def of_bytes(cls, sent: bytes) -> PerProcessState:
        """Returns the state that ``to_bytes`` serialized, with all leaves on the host."""
        start = 8 + int.from_bytes(sent[:8])
        nodes, descriptions = json.loads(sent[8:start])
        leaves = {}
        for name, dtype, shape in descriptions:
            count = math.prod(shape)
            host = np.frombuffer(sent, np.dtype(dtype), count, start).reshape(shape)
            leaves[name] = host
            start += host.nbytes
        return cls(nodes, leaves)


def split(captured: Mapping[str, Captured]) -> tuple[list[str], list[Array], PerProcessState]:
    """Separates the leaves that a step stores once from this process's per-process state.

    Returns:
      The names of the shared leaves, the arrays of the shared leaves, and the per-process state.
    """
    shared: dict[str, Array] = {}
    local: dict[str, Array] = {}
    for component, part in captured.items():
        for name, array in part.by_name().items():
            if component not in COMPONENTS:
                shared[name] = array
            elif not isinstance(array, jax.Array):
                local[name] = array
            elif array.is_fully_addressable:
                local[name] = copied(array)  # a later step may donate the original
            else:
                shared[name] = array
    nodes = {name: part.form.node for name, part in captured.items() if name in COMPONENTS}
    return list(shared), list(shared.values()), PerProcessState(nodes, local)


def joined(sent: Sequence[bytes]) -> tuple[dict[str, Node], dict[str, np.ndarray]]:
    """Joins the per-process states of all processes into nodes and leaves to store.

    Args:
      sent: for each process, in order, the result of ``PerProcessState.to_bytes``.

    Returns:
      Component -> node for the document, and leaf name -> array on the host.
    """
    first = PerProcessState.of_bytes(sent[0])
    leaves: dict[str, np.ndarray] = dict(first.leaves)
    others: list[list[Any]] = []
    for index, message in enumerate(sent[1:], start=1):
        state = PerProcessState.of_bytes(message) if message != sent[0] else None
        node = None
        if state is not None:
            nodes = {name: _renamed(node, state, index) for name, node in state.nodes.items()}
            node = {"dict": [list(pair) for pair in nodes.items()]}
            leaves.update({of_process(index, name): leaf for name, leaf in state.leaves.items()})
        others.append([str(index), node])
    document = dict(first.nodes)
    if any(node is not None for _, node in others):
        document[PROCESSES] = {"dict": others}
    return document, leaves


def _renamed(node: Node, state: PerProcessState, index: int) -> Node:
    renamed = copy.deepcopy(node)
    for child in array_nodes(renamed):
        if child["array"] in state.leaves:
            child["array"] = of_process(index, child["array"])
    return renamed


def count_of(document: Mapping[str, Node]) -> int | None:
    """Returns how many processes saved the document; None if all saved equal per-process states."""
    if PROCESSES not in document:
        return None
    return 1 + len(node_checks.fields(document[PROCESSES], PROCESSES))


class Place(Protocol):
    """The index of a process in the run, and the number of processes in the run."""

    index: int
    count: int


def document_of(document: Mapping[str, Node], place: Place, where: str) -> Mapping[str, Node]:
    """Returns the document that one process restores, with the per-process state for this process.

    Warns on process 0 if the number of processes that restore the step differs from the number that
    saved it.

    Args:
      document: the document of the step.
      place: the process that restores, and the number of processes.
      where: the step, for messages.

    Raises:
      CorruptCheckpointError: the entries for the processes are malformed.
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
        lost = f"the states of processes {count} to {saved - 1} are left out"
        twice = (
            f"processes {saved} to {count - 1} start with the same state as others, so "
            "their random numbers and data are not independent"
        )
        user_warnings.warn(
            f"{where} was saved by {saved} processes and is restored by {count}. Each process "
            f"takes the per-process state ({named}) of the process with its index modulo {saved}: "
            f"{lost if count < saved else twice}.",
            stacklevel=2,
        )
    entry = others.get(str(index % saved))
    local = {} if entry is None else node_checks.fields(entry, PROCESSES)
    return {name: local.get(name, node) for name, node in document.items() if name != PROCESSES}
