"""Restores from a local tier, in which each host has saved the shards of its own devices.

All slices have equal data, so a host whose copy is lost, or lacks the part that the current
shardings need of it (after a restart, a host may have another position in the mesh), receives this
part over the device network from the host at that position in another slice. Shared storage is not
read. A leaf whose sharding has changed is restored with that of the save, then resharded.

Each host's copy has the per-process state of its own process and of a few others. What a host lacks
of it, and of leaves that do not span hosts, it receives as messages that process 0 arranges, so
that no process gets a message about every other process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from torchax_ckpt.devices.move_shards import permute_over_processes, put, reshard
from torchax_ckpt.devices.sharding import shards_as, spans_hosts
from torchax_ckpt.errors import CorruptCheckpointError, DirectoryError, StepNotFoundError
from torchax_ckpt.layout.manifest import Node, array_nodes
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.restoring import host_shards
from torchax_ckpt.restoring.host_shards import Answer, StateSenders, rounds_of, routes, runs
from torchax_ckpt.restoring.restorable_step import RestorableStep
from torchax_ckpt.runtime.user_messages import counted
from torchax_ckpt.saving import host_parts
from torchax_ckpt.saving.host_parts import digest
from torchax_ckpt.state import per_process_state
from torchax_ckpt.state.component import LeafRead
from torchax_ckpt.state.per_process_state import PerProcessState, ProcessStates
from torchax_ckpt.storage.directory.committed_step import CommittedStep, Verified
from torchax_ckpt.stored.stored_step import Compared, StoredStep

logger = logging.getLogger(__name__)

_NO_COPY = (
    "no host has a readable, undamaged copy of this step that contains what is asked for. "
    "No host alone stores whole leaves: call load with an abstract_state whose shardings span all "
    "hosts, or read the step from the durable tier (tier='durable')"
)


class HostSteps:
    """One step in the local tiers of all hosts, read like a ``RestorableStep``.

    All processes must call its methods in the same order, within a round. Hosts may have no copy:
    the path of ``committed`` need not exist. ``verified`` is of this host's copy only.
    """

    def __init__(
        self,
        committed: CommittedStep,
        options: CheckpointOptions,
        processes: Processes,
        replica_axis: str,
        verified: Verified,
    ) -> None:
        self.committed = committed
        self._verified, self._axis = verified, replica_axis
        self._options = dataclasses.replace(options, single_replica_restore=False)
        self._processes = processes
        # This host's copy; None if the copy does not exist, is damaged or does not fit the reads.
        self._copy: RestorableStep | None = None
        if committed.path.exists():
            with self._ignoring_damage():
                self._copy = RestorableStep(StoredStep(committed, self._options, allow_part=True))
        # The host leaves of this process's state. They are read at once, because in every copy of
        # the step their names stand for the state of the process that wrote the copy.
        self._state_leaves: dict[str, np.ndarray] = {}
        self._has_own_state = False
        self.attached: Sequence[str] | None  # see ``Manifest``
        self.document: Mapping[str, Node]
        self.document, self._specs = self._opened()

    @property
    def compared(self) -> Compared | None:
        """What was read from this host's copy, if it was not ignored."""
        return None if self._copy is None else self._copy.compared

    def _opened(self) -> tuple[Mapping[str, Node], Mapping[str, Any]]:
        """Returns the document for this process, and the shardings of leaves at the save."""
        index, content, states = self._processes.index, "", None
        if self._copy is not None:
            document = self._copy.document
            with self._ignoring_damage():
                shared = per_process_state.without_states(document)
                parts = [host_parts.whole(shared), host_parts.specs(shared)]
                content = json.dumps([*parts, self._copy.attached])
                states = ProcessStates.of_document(document)
        state_bytes = b""
        if states is not None and (states.count is None or index in states.nodes):
            state_bytes = self._state(states.of_process(index))
            if not state_bytes:  # the copy is damaged, and ignored
                states = None
        report: list[Any] = [None, None, []]
        if states is not None:
            indices = [] if states.count is None else sorted(states.nodes)
            report = [digest(content), states.count, indices]
        answer = self._processes.answer(json.dumps(report).encode(), self._first_answers)
        count, sender, receives, posts, state_answer = json.loads(answer)
        if posts:
            self._processes.post("content", content.encode())
        self._has_own_state = state_answer[0] is None
        state_bytes = self._received_state(states, state_answer) or state_bytes
        if receives:
            content = self._processes.posted("content", sender).decode()
        state = PerProcessState.of_bytes(state_bytes)
        nodes, self._state_leaves = state.nodes, dict(state.leaves)
        document, specs, self.attached = json.loads(content)
        specs |= host_parts.specs(nodes)
        return per_process_state.with_states(document, host_parts.whole(nodes), count), specs

    def _first_answers(self, reports: Sequence[bytes]) -> list[bytes]:
        """Decides on process 0 which processes send a document or a per-process state to which.

        Messages are (digest of a copy's document, number of processes that saved it, indices of its
        states); answers are (that number, sender, receives, sends, answer of ``StateSenders``).
        """
        digests, counts, states = zip(*map(json.loads, reports), strict=True)
        if not any(digests):
            raise self._unreadable(_NO_COPY)
        first = next(index for index, its_digest in enumerate(digests) if its_digest)
        if counts[first] not in (None, len(reports)):
            raise self._unreadable(
                f"{counted(counts[first], 'host')} saved this step, {len(reports)} read it. Read "
                "it with as many hosts, or read the step from the durable tier (tier='durable')"
            )
        if counts[first] is None:
            self._state_senders = StateSenders.of_equal(map(bool, digests))
        else:
            self._state_senders = StateSenders.of_states(states)
        receives = [its_digest != digests[first] for its_digest in digests]
        answers = zip(
            [counts[first]] * len(reports),
            [first] * len(reports),
            receives,
            [index == first and any(receives) for index in range(len(reports))],
            self._state_answers(self._state_senders.lacking),
            strict=True,
        )
        return [json.dumps(answer).encode() for answer in answers]

    def _state_answers(self, lacking: Sequence[int]) -> list[Answer]:
        try:
            return self._state_senders.answers(lacking)
        except LookupError as error:
            raise self._unreadable(
                "no host has an undamaged copy of the random state and the loader positions of "
                f"process {error}; restore another step, or this step from the durable tier "
                "(tier='durable')"
            ) from None

    def _next_answers(self, lacking: Sequence[bytes]) -> list[bytes]:
        return [json.dumps(answer).encode() for answer in self._state_answers(b"".join(lacking))]

    def _received_state(self, states: ProcessStates | None, answer: Answer) -> bytes:
        """Sends other processes their states; returns the state that this one is sent, or b""."""
        state_bytes, (sender, posts, is_any) = b"", answer
        while is_any:
            for index in posts:
                assert states is not None
                self._processes.post(f"state {index}", self._state(states.of_process(index)))
            if sender is not None:
                state_bytes = self._processes.posted(f"state {self._processes.index}", sender)
            is_lacking = sender is not None and not state_bytes
            reply = self._processes.answer(bytes([is_lacking]), self._next_answers)
            sender, posts, is_any = json.loads(reply)
        return state_bytes

    def _state(self, nodes: Mapping[str, Node]) -> bytes:
        """Returns a per-process state of this host's copy as a message; b"" if it is damaged."""
        if self._copy is None:  # it was damaged in the state that another process has asked for
            return b""
        with self._ignoring_damage():
            found = [node for part in nodes.values() for node in array_nodes(part)]
            arrays = [node["array"] for node in found if "spec" not in node]
            reads = host_shards.on_host(self._copy.document, arrays)
            self._copy.require_plausible(reads)
            return PerProcessState(nodes, self._copy.read_leaves(reads)).to_bytes()
        return b""

    def require_plausible(self, reads: Mapping[str, LeafRead]) -> None:
        """Ignores this host's copy, for another's, if it is damaged or does not fit."""
        if self._copy is None:
            return
        reads = host_shards.as_saved(self._without_state(reads), self._specs)
        self._needed(reads)
        document = self._copy.document
        try:
            host_shards.stored_starts(reads, document)
        except ValueError as error:
            logger.info("cannot use %s on this host: %s", self.committed.path, error)
            self._copy = None
            return
        with self._ignoring_damage():
            self._copy.require_plausible({**reads, **host_shards.of_reads(reads, document)})

    def is_whole(self, reads: Mapping[str, LeafRead], num_processes: int) -> bool:
        """Returns whether a restore with ``reads`` reads every stored byte of this host's copy."""
        if self._copy is None or not self._has_own_state:
            return False
        return self._copy.is_whole(reads, num_processes)

    def _without_state(self, reads: Mapping[str, LeafRead]) -> dict[str, LeafRead]:
        return {name: read for name, read in reads.items() if name not in self._state_leaves}

    def read_leaves(self, reads: Mapping[str, LeafRead]) -> dict[str, Any]:
        """Returns leaf name -> array; other hosts send what this host's copy lacks."""
        state = {name: read for name, read in reads.items() if name in self._state_leaves}
        found = put({n: np.array(self._state_leaves[n]) for n in state}, _placements(state))
        reads = self._without_state(reads)
        return {**found, **self._read(reads)}

    def _read(self, reads: Mapping[str, LeafRead]) -> dict[str, Any]:
        requested, reads = reads, host_shards.as_saved(reads, self._specs)
        spanning = {
            name: reads[name] for name in sorted(reads) if spans_hosts(reads[name].placement)
        }
        values: dict[str, Any] | None = None
        if self._copy is not None:
            with self._ignoring_damage():
                parts = host_shards.of_reads(reads, self._copy.document)
                values = self._copy.read_leaves({**reads, **parts})
        on_one_host = {name: read for name, read in reads.items() if name not in spanning}
        found = self._spanning_leaves(spanning, values)
        # In the same order on every process: resharding runs collectives.
        moved = [n for n in spanning if requested[n].placement != reads[n].placement]
        reshard(found, {name: _target(requested[name]) for name in moved})
        return {**self._local_leaves(on_one_host, values), **found}

    # --- leaves that do not span hosts ---

    def _local_leaves(
        self, reads: Mapping[str, LeafRead], values: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Returns the leaves that do not span hosts, which each host's copy has, or sends."""
        flags = bytes([values is not None, values is None and bool(reads)])
        sender, is_asked = json.loads(self._processes.combine(flags, self._sender))
        if is_asked and sender == self._processes.index:
            assert self._copy is not None
            found = self._copy.read_leaves(host_shards.on_host(self._copy.document, reads))
            self._processes.post("leaves", PerProcessState({}, found).to_bytes())
        if values is None and reads:
            sent = PerProcessState.of_bytes(self._processes.posted("leaves", sender)).leaves
            return put({name: np.array(sent[name]) for name in reads}, _placements(reads))
        return {} if values is None else {name: values[name] for name in reads}

    def _sender(self, flags: Sequence[bytes]) -> bytes:
        """Decides on process 0 who sends these leaves, given who has and who needs them."""
        has, needs = zip(*flags, strict=True)
        if any(needs) and not any(has):
            raise self._unreadable(_NO_COPY)
        return json.dumps([has.index(1) if any(needs) else None, any(needs)]).encode()

    # --- leaves that span hosts ---

    def _spanning_leaves(
        self, reads: Mapping[str, LeafRead], values: dict[str, Any] | None
    ) -> dict[str, Any]:
        stored = None
        if values is not None and self._copy is not None:
            stored = digest(host_shards.stored_starts(reads, self._copy.document))
        message = json.dumps([digest(self._needed(reads)), stored, _slice_of(reads, self._axis)])
        num_own, found_runs = json.loads(self._processes.combine(message.encode(), self._routes))
        rounds = rounds_of(found_runs)
        logger.info(
            "step %d: %d of %d processes restore from their own host's copy, the others receive "
            "their parts from other hosts",
            self.committed.step,
            num_own,
            self._processes.count,
        )
        if rounds:
            found = {} if values is None else {name: values[name] for name in reads}
            try:
                permute_over_processes(found, {n: _target(r) for n, r in reads.items()}, rounds)
            except ValueError as error:
                raise self._unreadable(str(error)) from error
            return found
        assert values is not None
        return {
            name: shards_as(values[name], read.placement, read.spec.shape)  # type: ignore[arg-type]
            for name, read in reads.items()
        }

    def _routes(self, messages: Sequence[bytes]) -> bytes:
        """Decides on process 0 which process sends its part to which, given their messages."""
        needs, holds, slices = zip(*map(json.loads, messages), strict=True)
        try:
            found = runs(routes(needs, holds, slices))
        except LookupError:
            lacking = [i for i, part in enumerate(needs) if part not in holds]
            raise self._unreadable(
                f"no host has the parts that processes {lacking} need; restore another step, or "
                "this step from the durable tier (tier='durable')"
            ) from None
        num_own = sum(part == held for part, held in zip(needs, holds, strict=True))
        return json.dumps([num_own, found]).encode()

    def _needed(self, reads: Mapping[str, LeafRead]) -> dict[str, list[list[int]]]:
        try:
            return host_shards.needed_starts(reads)
        except ValueError as error:
            raise self._unreadable(str(error)) from error

    @contextlib.contextmanager
    def _ignoring_damage(self) -> Iterator[None]:
        """Drops a copy that is damaged or cannot be read; another host may have the data."""
        try:
            with self._verified.noting_damage(self.committed):
                yield
        except (CorruptCheckpointError, DirectoryError, StepNotFoundError) as error:
            self._copy = None  # values from other hosts do not verify it
            logger.warning("the copy of host %s is ignored: %s", socket.gethostname(), error)

    def _unreadable(self, why: str) -> CorruptCheckpointError:
        place = self.committed.path.parent  # the step itself may not exist on this host
        return CorruptCheckpointError(
            f"step {self.committed.step} of the local tier, {place}: {why}",
            step=self.committed.step,
            path=place,
        )


def _target(read: LeafRead) -> jax.ShapeDtypeStruct:
    spec = read.spec
    return jax.ShapeDtypeStruct(spec.shape, np.dtype(spec.dtype), sharding=read.placement)


def _placements(reads: Mapping[str, LeafRead]) -> dict[str, Any]:
    return {name: read.placement for name, read in reads.items()}


def _slice_of(reads: Mapping[str, LeafRead], axis: str) -> int:
    """Returns the index of the slice that contains this process; 0 if no mesh has ``axis``."""
    meshes = {
        read.placement.mesh for read in reads.values() if isinstance(read.placement, NamedSharding)
    }
    for mesh in sorted((m for m in meshes if axis in m.shape), key=lambda m: m.axis_names):
        here = np.isin(mesh.device_ids, [device.id for device in mesh.local_devices])
        return int(np.argwhere(here)[0][mesh.axis_names.index(axis)])
    return 0
