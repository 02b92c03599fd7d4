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

In a local tier, the step of each host holds the per-process state of its own process, and copies of
the states of a few others. The state of its own process then takes the place of that of process 0,
and the entries ``count`` and ``index`` under the key ``processes`` say how many processes saved the
step, and which of them is this one.

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
# Keys beside the indices of processes, in the step of one host in a local tier.
_COUNT, _INDEX = "count", "index"


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
    document, leaves, others = _joined(sent[0], dict(enumerate(sent[1:], start=1)))
    # The number of processes matters for loaders also if their states are equal.
    if any(node is not None for _, node in others) or (others and LOADER in document):
        document[PROCESSES] = {"dict": others}
    return document, leaves


def on_host(
    index: int, count: int, state: bytes, kept: Mapping[int, bytes]
) -> tuple[dict[str, Node], dict[str, np.ndarray]]:
    """Joins the per-process states that the step of one host in a local tier holds.

    Args:
      index: the index of the host's process.
      count: the number of processes.
      state: the state of this process, as ``PerProcessState.to_bytes`` returned it.
      kept: the states of other processes of which this host keeps copies, by index.

    Returns:
      As ``joined``; the nodes outside of ``processes`` are those of this process.
    """
    document, leaves, others = _joined(state, kept)
    document[PROCESSES] = {"dict": [[_COUNT, count], [_INDEX, index], *others]}
    return document, leaves


def _joined(
    first: bytes, others: Mapping[int, bytes]
) -> tuple[dict[str, Node], dict[str, np.ndarray], list[Any]]:
    """Returns the nodes of a state, the leaves of all states, and the entries of the others."""
    mine = PerProcessState.of_bytes(first)
    leaves: dict[str, np.ndarray] = dict(mine.leaves)
    entries: list[Any] = []
    for index, message in sorted(others.items()):
        node = None
        if message != first:
            state = PerProcessState.of_bytes(message)
            renamed = {name: _renamed(node, state, index) for name, node in state.nodes.items()}
            node = {"dict": [list(pair) for pair in renamed.items()]}
            leaves.update({of_process(index, name): leaf for name, leaf in state.leaves.items()})
        entries.append([str(index), node])
    return dict(mine.nodes), leaves, entries


@dataclasses.dataclass(frozen=True)
class HostStates:
    """The per-process states in the step of one host in a local tier.

    Attributes:
      count: the number of processes that saved the step; None if their states were equal.
      nodes: index of a process -> component -> node. Empty if ``count`` is None.
      equal: the nodes of every process if ``count`` is None.
    """

    count: int | None
    nodes: Mapping[int, Mapping[str, Node]]
    equal: Mapping[str, Node]

    @classmethod
    def of_document(cls, document: Mapping[str, Node]) -> HostStates:
        """Returns the states in a document that ``on_host`` or, before, ``joined`` has made.

        Raises:
          CorruptCheckpointError: the entries for the processes are malformed.
        """
        own = {name: document[name] for name in COMPONENTS if name in document}
        if (count := count_of(document)) is None:
            return cls(None, {}, own)
        others = node_checks.fields(document[PROCESSES], PROCESSES)
        others.pop(_COUNT, None)
        index = others.pop(_INDEX, 0)
        if type(index) is not int or not all(map(str.isdecimal, others)):
            raise node_checks.corrupt(PROCESSES, "indices of processes", f"{others.keys()!r:.80}")
        nodes = {
            int(i): own if node is None else {**own, **node_checks.fields(node, PROCESSES)}
            for i, node in others.items()
        }
        return cls(count, {**nodes, index: own}, {})

    def of_process(self, index: int) -> Mapping[str, Node]:
        """Returns component -> node of a process, whose states this host's step holds."""
        return self.equal if self.count is None else self.nodes[index]


def without_states(document: Mapping[str, Node]) -> dict[str, Node]:
    """Returns the document without the per-process states."""
    return {n: node for n, node in document.items() if n not in (*COMPONENTS, PROCESSES)}


def with_states(
    document: Mapping[str, Node], states: Mapping[str, Node], count: int | None
) -> Mapping[str, Node]:
    """Returns a document in which all of ``count`` processes have the given states."""
    if count is None:
        return {**document, **states}
    others: list[Any] = [[str(index), None] for index in range(1, count)]
    return {**document, **states, PROCESSES: {"dict": others}}


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
    others = node_checks.fields(document[PROCESSES], PROCESSES)
    count = others.get(_COUNT, 1 + len(others))
    if type(count) is not int:
        raise node_checks.corrupt(PROCESSES, "a number of processes", f"{count!r:.80}")
    return count


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
    if _COUNT in others:
        raise node_checks.corrupt(
            PROCESSES,
            "the states of all processes",
            "those in the step of one host in a local tier: the hosts that saved it can restore it "
            "together, with LocalTier; elsewhere read a step of the run's durable directory",
        )
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
