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
that process i modulo n saved, and process 0 emits a warning. The states of loaders go to the user's
``redistribute`` instead, if there is one.
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
from torchax_ckpt.state.loaders.saved_states import LOADER, SavedStates, is_elastic

COMPONENTS = (LOADER, "stateful", "rng")


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
    # The number of processes matters for loaders also if their states are equal.
    if any(node is not None for _, node in others) or (others and LOADER in first.nodes):
        document[PROCESSES] = {"dict": others}
    return document, leaves


def _renamed(node: Node, state: PerProcessState, index: int) -> Node:
    renamed = copy.deepcopy(node)
    for child in array_nodes(renamed):
        if child["array"] in state.leaves:
            child["array"] = of_process(index, child["array"])
    return renamed


def count_of(document: Mapping[str, Node]) -> int | None:
    """Returns how many processes saved the document; None if one did, or equal states were saved.

    If a loader was attached, None always stands for one process.
    """
    if PROCESSES not in document:
        return None
    return 1 + len(node_checks.fields(document[PROCESSES], PROCESSES))


class Place(Protocol):
    """The index of a process in the run, and the number of processes in the run."""

    index: int
    count: int


def document_of(
    document: Mapping[str, Node], place: Place, where: str, *, redistributes: bool = False
) -> Mapping[str, Any]:
    """Returns the document that one process restores, with the per-process state for this process.

    Warns on process 0 if the number of processes that restore the step differs from the number that
    saved it, and names the components whose states are then left out or used twice.

    Args:
      document: the document of the step.
      place: the process that restores, and the number of processes.
      where: the step, for messages.
      redistributes: whether the user redistributes the states of loaders. If so, and the number of
        processes has changed, the loader's entry is a ``SavedStates``.

    Raises:
      CorruptCheckpointError: the entries for the processes are malformed.
    """
    saved = count_of(document)
    if saved is None and (LOADER not in document or place.count == 1):
        return document
    local = _of_each_process(document, saved)
    saved = len(local)
    result = {n: local[place.index % saved].get(n, node) for n, node in document.items()}
    result.pop(PROCESSES, None)
    if saved == place.count:
        return result
    affected = set().union(*local[1:])
    if LOADER in document:
        nodes = tuple(states.get(LOADER, document[LOADER]) for states in local)
        affected = affected - {LOADER} if is_elastic(nodes) else affected | {LOADER}
        if redistributes:
            affected -= {LOADER}
            result[LOADER] = SavedStates(nodes, place.index, place.count)
    if affected and place.index == 0:
        _warn(where, sorted(affected), saved, place.count)
    return result


def _of_each_process(document: Mapping[str, Node], saved: int | None) -> list[Mapping[str, Node]]:
    """Returns, for each process that saved, its states that the document does not have itself."""
    others = node_checks.fields(document.get(PROCESSES, {"dict": []}), PROCESSES)
    if others.keys() != {str(i) for i in range(1, saved or 1)}:
        raise node_checks.corrupt(
            PROCESSES, f"processes 1 to {(saved or 1) - 1}", f"{sorted(others)!r:.80}"
        )
    nodes = [others[str(i)] for i in range(1, saved or 1)]
    return [{}, *({} if node is None else node_checks.fields(node, PROCESSES) for node in nodes)]


def _warn(where: str, affected: Sequence[str], saved: int, count: int) -> None:
    if count < saved:
        result = f"the states of processes {count} to {saved - 1} are left out"
    else:
        result = (
            f"processes {saved} to {count - 1} start with the same state as others, so their "
            "random numbers and data are not independent"
        )
    remedy = ""
    if LOADER in affected:
        remedy = (
            " To lose no samples and see none twice, pass attach(redistribute=f), where "
            "f(states, count) returns the states for the new number of processes, or use a loader "
            "whose state holds for any number, such as Grain's ElasticIterator."
        )
    user_warnings.warn(
        f"{where} was saved by {saved} process{'es' * (saved > 1)} and is restored by {count}. "
        f"Each process takes the per-process state ({', '.join(affected)}) of the process with its "
        f"index modulo {saved}: {result}.{remedy}",
        stacklevel=3,
    )
