"""Saves and restores per-process state: state that differs between the processes of a run.

Each process sends its state of the components in ``COMPONENTS`` to process 0, which stores it
unless it equals its own. The document (component -> node) has the states of processes 1, 2, ...
under the key ``processes``; null means the state of process 0:

    {"dict": [["1", {"dict": [["rng", node], ...]}], ["2", null], ...]}

The leaves of process 1 have the names of process 0's leaves, prefixed with ``processes/1/``. In a
local tier, the step of each host has its own state in that place and copies of a few others, and
``count`` and ``index`` say how many processes saved the step, and which is this one.

If n processes saved the step, process i restores the state of process i modulo n; if their number
differs, loaders use the user's ``redistribute`` instead, if given.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from torchax_ckpt.layout.manifest import Node, array_nodes
from torchax_ckpt.layout.names import PROCESSES, of_process
from torchax_ckpt.runtime import user_messages
from torchax_ckpt.state import node_checks

LOADER = "dataloader"
COMPONENTS = (LOADER, "stateful", "rng")
# Keys in addition to the indices of processes, in the step of one host in a local tier.
_COUNT, _INDEX = "count", "index"
# The key under which Grain's ElasticIterator keeps the position of all processes.
_GLOBAL_POSITION = "global_next_index"


@dataclasses.dataclass(frozen=True)
class PerProcessState:
    """The per-process state of one process at one moment."""

    nodes: Mapping[str, Node]  # by component
    leaves: Mapping[str, Any]  # by name, on the host or on devices of this process alone

    def to_bytes(self) -> bytes:
        """Returns the state as a message, with all leaves on the host; equal states are equal."""
        hosts = {name: np.asarray(leaf) for name, leaf in self.leaves.items()}
        descriptions = [[name, host.dtype.name, host.shape] for name, host in hosts.items()]
        header = json.dumps([self.nodes, descriptions]).encode()
        return b"".join([len(header).to_bytes(8), header, *(h.tobytes() for h in hosts.values())])

    @classmethod
    def of_bytes(cls, sent: bytes) -> PerProcessState:
        """Returns the state in a message of ``to_bytes``, with all leaves on the host."""
        start = 8 + int.from_bytes(sent[:8])
        nodes, descriptions = json.loads(sent[8:start])
        leaves = {}
        for name, dtype, shape in descriptions:
            count = math.prod(shape)
            host = np.frombuffer(sent, np.dtype(dtype), count, start).reshape(shape)
            leaves[name] = host
            start += host.nbytes
        return cls(nodes, leaves)


def joined(
    first: bytes, others: Mapping[int, bytes], host: tuple[int, int] | None = None
) -> tuple[dict[str, Node], dict[str, np.ndarray]]:
    """Returns component -> node, and leaf name -> host array, from processes' ``to_bytes``.

    ``host``: number of processes and index, for the step of one host in a local tier.
    """
    local = PerProcessState.of_bytes(first)
    document, leaves = dict(local.nodes), dict(local.leaves)
    entries: list[Any] = []
    for index, message in sorted(others.items()):
        node = None
        if message != first:
            state = PerProcessState.of_bytes(message)
            renamed = {name: _renamed(node, state, index) for name, node in state.nodes.items()}
            node = {"dict": [list(pair) for pair in renamed.items()]}
            leaves.update({of_process(index, name): leaf for name, leaf in state.leaves.items()})
        entries.append([str(index), node])
    if host is not None:
        entries = [*map(list, zip((_COUNT, _INDEX), host, strict=True)), *entries]
    # The number of processes matters for loaders also if their states are equal.
    if any(node is not None for _, node in entries) or (entries and LOADER in document):
        document[PROCESSES] = {"dict": entries}
    return document, leaves


@dataclasses.dataclass(frozen=True)
class ProcessStates:
    """The per-process states in a document: of all processes, or those in the step of one host."""

    count: int | None  # processes that saved the step; None if one did, or all states were equal
    nodes: Mapping[int, Mapping[str, Node]]  # by process and component; equal ones are one object
    is_of_host: bool = False  # in a local tier; older steps there have the states of all processes

    @classmethod
    def of_document(cls, document: Mapping[str, Node]) -> ProcessStates:
        """Parses the states; raises CorruptCheckpointError if they are malformed."""
        local = {name: document[name] for name in COMPONENTS if name in document}
        # joined() records the number if there is a loader, even if the states are equal.
        if PROCESSES not in document:
            return cls(None, {0: local})
        others = node_checks.fields(document[PROCESSES], PROCESSES)
        is_of_host = _COUNT in others
        index = others.pop(_INDEX, 0)
        count = others.pop(_COUNT, 1 + len(others))
        are_indices = all(i.isdecimal() and len(i) < 10 for i in others)
        if type(index) is not int or type(count) is not int or not are_indices:
            found = f"{count!r:.40}, {index!r:.40}, {[*others]!r:.80}"
            raise node_checks.corrupt(PROCESSES, "a number and indices of processes", found)
        nodes = {
            int(i): local if node is None else {**local, **node_checks.fields(node, PROCESSES)}
            for i, node in others.items()
        }
        return cls(count, {**nodes, index: local}, is_of_host)

    def of_process(self, index: int) -> Mapping[str, Node]:
        """Returns component -> node of a process whose states the document has."""
        return self.nodes[0 if self.count is None else index]


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


def document_of(
    document: Mapping[str, Node],
    index: int,
    count: int,
    where: str,
    *,
    redistributes: bool = False,
    taken: Collection[str] = COMPONENTS,
) -> Mapping[str, Any]:
    """Returns what process ``index`` of ``count`` restores; may warn of ``taken`` components."""
    states = ProcessStates.of_document(document)
    if states.count is None and (LOADER not in document or count == 1):
        return document
    if states.is_of_host:
        raise node_checks.corrupt(
            PROCESSES,
            "the states of all processes",
            "those in the step of one host in a local tier: the hosts that saved it can restore it "
            "together, with LocalTier; elsewhere read a step of the run's durable directory",
        )
    saved = states.count or 1
    if states.nodes.keys() != set(range(saved)):
        found = f"{sorted(states.nodes)!r:.80}"
        raise node_checks.corrupt(PROCESSES, f"processes 0 to {saved - 1}", found)
    local = [states.nodes[i] for i in range(saved)]
    result = {n: local[index % saved].get(n, node) for n, node in document.items()}
    result.pop(PROCESSES, None)
    if saved == count:
        return result
    affected = set().union(*(each for each in local if each is not local[0]))
    if LOADER in document:
        nodes = tuple(each[LOADER] for each in local)
        affected = affected - {LOADER} if is_elastic(nodes) else affected | {LOADER}
        if redistributes:
            affected -= {LOADER}
            result[LOADER] = SavedStates(nodes, index, count)
    if (affected := affected.intersection(taken)) and index == 0:
        _warn(where, sorted(affected), saved, count)
    return result


def _warn(where: str, affected: Sequence[str], saved: int, count: int) -> None:
    if count < saved:
        result = f"the state of each process from {count} on is left out"
    else:
        result = (
            f"processes {saved} to {count - 1} start with the same state as others, so their "
            "random numbers and data are not independent"
        )
    remedy = ""
    if LOADER in affected:
        remedy = (
            f" To lose no samples and see none twice, restore with {saved} (plain PyTorch: with "
            "StorageReader), or under torchax pass attach(redistribute=f), where f(states, count) "
            "returns the states for the new number, or use a loader whose state holds for any "
            "number, such as Grain's ElasticIterator."
        )
    user_messages.warn(
        f"{where} was saved by {saved} process{'es' * (saved > 1)} and is restored by {count}. "
        f"Each process takes the per-process state ({', '.join(affected)}) of the process with its "
        f"index modulo {saved}: {result}.{remedy}"
    )


# --- loaders -----------------------------------------------------------------------------------

STATE_DICT = ("state_dict", "load_state_dict")
_METHODS = (STATE_DICT, ("get_state", "set_state"), ("save_state_rank", "restore_state_rank"))


def methods_of(value: object) -> tuple[str, str] | None:
    """Returns the names of the methods that return and set an object's state; None without any."""
    if isinstance(value, type):
        return None
    for pair in _METHODS:
        if all(callable(getattr(value, name, None)) for name in pair):
            return pair
    return None


def end_of_epoch(where: str, loader: Any, state: Any) -> str | None:
    """Returns a warning if a loader's state is that after the last batch of an epoch, else None.

    Knows the states of torchdata's loader, also while its workers fetch ahead. Returns None if the
    loop over the epoch has ended, and for a stream, which does not know its number of batches.
    """
    if not isinstance(state, Mapping) or state.get("_iterator_finished") is not False:
        return None
    from torch.utils.data import IterableDataset  # the loader has imported it

    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None
    num_batches, sampler_state = state.get("_num_yielded"), state.get("_sampler_iter_state")
    if num_batches is None:  # with workers
        snapshot, num_since = state.get("_snapshot", {}), state.get("_steps_since_snapshot", 0)
        num_batches = snapshot.get("_snapshot_step", 0) + num_since
        if not num_since:
            sampler_state = snapshot.get("_main_snapshot", {}).get("_sampler_iter_state")
    try:
        if isinstance(sampler_state, Mapping) and loader.batch_size:  # which may have changed
            num_left = len(loader.sampler) - sampler_state["samples_yielded"]
            is_at_end = 0 <= num_left < (loader.batch_size if loader.drop_last else 1)
        else:
            is_at_end = num_batches == operator.length_hint(loader, -1)
    except Exception:  # of a sampler of the user's, which need not know its length
        return None
    if not is_at_end:
        return None
    return (
        f"{where}: the step was saved on the last batch of an epoch, so the next loop over this "
        "loader yields no batch, and the loop after it yields the next epoch. A program that "
        "counts steps may ignore this. A loop over epochs must begin with the epoch of the last "
        "completed step, range(max(start - 1, 0) // len(loader), num_epochs); with "
        "start // len(loader) it would train one epoch less."
    )


def state_dict_hint(value: object) -> str:
    """Returns what to add to an error if ``value`` may be what ``state_dict()`` returned."""
    if isinstance(value, Mapping) and value and not any(map(methods_of, value.values())):
        return ". If state_dict() returned this dict, give the object itself in its place"
    return ""


@dataclasses.dataclass(frozen=True)
class SavedStates:
    """The states of a loader on all processes that saved a step, for another number of them."""

    nodes: tuple[Node, ...]  # of each process that saved the step, in order
    index: int  # of the process that restores
    count: int  # of processes that restore

    def of_member(self, name: str, where: str) -> SavedStates:
        """Returns the nodes of one of several loaders, which were attached by name."""
        nodes = [node_checks.fields(node, where) for node in self.nodes]
        if missing := [i for i, members in enumerate(nodes) if name not in members]:
            raise node_checks.corrupt(where, f"{name} of every process", f"none of {missing[0]}")
        return dataclasses.replace(self, nodes=tuple(members[name] for members in nodes))

    def share(self, states: Sequence[Any]) -> Any:
        """Returns this process's state of those that the user's ``redistribute`` returned."""
        if len(states) != self.count:
            raise ValueError(
                f"redistribute returned {user_messages.counted(len(states), 'state')}, expected "
                f"{self.count}, one for each process"
            )
        return states[self.index]


def is_elastic(nodes: Sequence[Node]) -> bool:
    """Returns whether any of these states restores the loader on any number of processes."""
    # States of Grain's ElasticIterator are equal on all processes, and count the samples of all.
    first = nodes[0]
    pairs = first.get("dict") if isinstance(first, Mapping) else None
    if not isinstance(pairs, list) or any(node != first for node in nodes):
        return False
    if first.get("group") is True:
        return all(isinstance(p, list) and len(p) == 2 and is_elastic([p[1]]) for p in pairs)
    return [pair[0] for pair in pairs if isinstance(pair, list) and pair] == [_GLOBAL_POSITION]
