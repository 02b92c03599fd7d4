"""Restores from a local tier, in which each host has saved the shards of its own devices.

All slices have equal data. If a host has lost its copy of a step, the host at the same position in
another slice has the same data. After a restart, a host may have another position in the mesh than
at the save. The manifest of a host's copy says which part of the state the copy holds. The current
shardings determine which part the host needs. Each host reads its own copy. If a host needs a part
that its copy lacks, the host receives this part from another host over the device network. A
restore from a local tier reads nothing from shared storage. If each host has the part that it
needs, no host sends anything. If a leaf's sharding has changed since the save, the leaf is first
restored with the sharding of the save, and then the devices reshard it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.processes.per_host import PerHostProcesses
from torchax_ckpt.restoring import host_shards, step_reader
from torchax_ckpt.restoring.shard_exchange import routes
from torchax_ckpt.snapshot.move_shards import permute_over_processes, put, reshard
from torchax_ckpt.snapshot.sharding import shards_as, spans_hosts
from torchax_ckpt.state.component import Read
from torchax_ckpt.state.per_process_state import PerProcessState
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.verified import Verified

logger = logging.getLogger(__name__)


class HostSteps:
    """One step in the local tiers of all hosts; a host's copy holds the shards of its own devices.

    Implements ``Source``. All processes must call its methods in the same order, within a round.
    Some hosts may have no copy of the step.

    Args:
      committed: the step, at its path on this host; the path need not exist.
      options: how the step is read.
      index: the index of this process.
      processes: the processes of the run.
      replica_axis: the mesh axis along which slices lie. A host receives its part from its own
        slice if possible.
      verified: records damage of this host's copy. Damage of another host's copy is not recorded,
        because it does not mean that this host's copy is damaged.

    Raises:
      CorruptCheckpointError: no host can read the step's manifest.
      ForeignCheckpointError: this package did not write the step.
    """

    def __init__(
        self,
        committed: CommittedStep,
        options: CheckpointOptions,
        index: int,
        processes: PerHostProcesses,
        replica_axis: str,
        verified: Verified,
    ) -> None:
        self.committed = committed
        self._verified, self._axis = verified, replica_axis
        self._options = dataclasses.replace(options, single_replica_restore=False)
        self._index = index
        self._processes = processes
        # This host's copy; None if the copy does not exist, is damaged or does not fit the reads.
        self._copy: step_reader.StoredLeaves | None = None
        if committed.path.exists():
            with self._ignoring_damage():
                self._copy = step_reader.StoredLeaves(committed, self._options, allow_part=True)
        content: list[Any] = []
        if self._copy is not None:
            document = self._copy.document
            content = [host_shards.whole(document), host_shards.specs(document)]
        self.document: Mapping[str, Node]
        self.document, self._specs = self._from_first(self._copy is not None, content)

    def require_plausible(self, reads: Mapping[str, Read]) -> None:
        """Ignores this host's copy from now on if the copy's arrays contradict the copy's manifest.

        Also ignores this host's copy if the copy's parts of leaves have other shapes than the parts
        that this host needs, or are divided differently among this host's devices. A host
        whose copy is ignored receives its part from another host.
        """
        if self._copy is None:
            return
        reads = host_shards.as_saved(reads, self._specs)
        self._needed(reads)
        copy, self._copy = self._copy, None
        try:
            host_shards.stored_starts(reads, copy.document)
        except ValueError as error:
            logger.warning("cannot use %s on this host: %s", self.committed.path, error)
            return
        with self._ignoring_damage():
            copy.require_plausible({**reads, **host_shards.of_reads(reads, copy.document)})
            self._copy = copy

    def is_whole(self, reads: Mapping[str, Read], num_processes: int) -> bool:
        """Returns whether a restore with ``reads`` reads every stored byte of this host's copy."""
        return self._copy is not None and self._copy.is_whole(reads, num_processes)

    def read(self, reads: Mapping[str, Read]) -> dict[str, Any]:
        """Returns leaf name -> array; other hosts send what this host's copy lacks."""
        asked, reads = reads, host_shards.as_saved(reads, self._specs)
        spanning = {
            name: reads[name] for name in sorted(reads) if spans_hosts(reads[name].placement)
        }
        values: dict[str, Any] | None = None
        if self._copy is not None:
            with self._ignoring_damage():
                parts = host_shards.of_reads(reads, self._copy.document)
                values = self._copy.read({**reads, **parts})
        if values is None:
            self._copy = None  # values from other hosts do not verify this host's copy
        here = {name: read for name, read in reads.items() if name not in spanning}
        found = self._spanning_leaves(spanning, values)
        # In the same order on every process: resharding runs collectives.
        moved = [n for n in spanning if asked[n].placement != reads[n].placement]
        reshard(found, {name: _target(asked[name]) for name in moved})
        return {**self._local_leaves(here, values), **found}

    # --- content that each host's step has ---

    def _local_leaves(
        self, reads: Mapping[str, Read], values: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Returns the leaves that do not span hosts, from this host's copy if it has one.

        Each host's copy holds all leaves that do not span hosts, so another host can send them to a
        host without a copy.
        """
        lacking = [] if values is not None else sorted(reads)
        asked = [json.loads(sent) for sent in self._processes.gather(json.dumps(lacking).encode())]
        wanted = sorted({name for names in asked for name in names})
        if wanted:
            found = None
            if values is not None and self._copy is not None:
                arrays = self._copy.read(host_shards.on_host(self._copy.document, wanted))
                found = PerProcessState({}, arrays).to_bytes()
            sent = PerProcessState.of_bytes(self._bytes_from_first(found)).leaves
            if values is None:
                placements = {name: read.placement for name, read in reads.items()}
                return put({name: np.array(sent[name]) for name in reads}, placements)
        return {} if values is None else {name: values[name] for name in reads}

    def _from_first(self, has_value: bool, value: Any) -> Any:
        """Returns, on all processes, the JSON value of the lowest-numbered process that has one."""
        sent = json.dumps(value).encode() if has_value else None
        return json.loads(self._bytes_from_first(sent))

    def _bytes_from_first(self, value: bytes | None) -> bytes:
        flags = self._processes.gather(b"" if value is None else b"1")
        if not any(flags):
            raise self._unreadable(
                "no host has an undamaged copy of this step that contains what this load or "
                "restore asks for. No host alone stores whole leaves: call load with an "
                "abstract_state whose shardings span all hosts, or read the step from the durable "
                "tier (tier='durable')"
            )
        first = next(index for index, flag in enumerate(flags) if flag)
        sent = value if value is not None and first == self._index else b""
        return self._processes.gather(sent)[first]

    # --- leaves that span hosts ---

    def _spanning_leaves(
        self, reads: Mapping[str, Read], values: dict[str, Any] | None
    ) -> dict[str, Any]:
        stored = None
        if values is not None and self._copy is not None:
            stored = _digest(host_shards.stored_starts(reads, self._copy.document))
        slice_index = _slice_of(reads, self._axis)
        message = json.dumps([_digest(self._needed(reads)), stored, slice_index]).encode()
        messages = [json.loads(sent) for sent in self._processes.gather(message)]
        needs, holds, slices = zip(*messages, strict=True)
        try:
            rounds = routes(needs, holds, slices)
        except LookupError:
            lacking = [i for i, part in enumerate(needs) if part not in holds]
            raise self._unreadable(
                f"no host has the parts that processes {lacking} need; restore another step, or "
                "this step from the durable tier (tier='durable')"
            ) from None
        logger.info(
            "step %d: processes %s restore from their own host's copy, the others receive their "
            "parts from other hosts",
            self.committed.step,
            [i for i, part in enumerate(needs) if part == holds[i]],
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

    def _needed(self, reads: Mapping[str, Read]) -> dict[str, list[list[int]]]:
        try:
            return host_shards.needed_starts(reads)
        except ValueError as error:
            raise self._unreadable(str(error)) from error

    @contextlib.contextmanager
    def _ignoring_damage(self) -> Iterator[None]:
        """Suppresses errors that show damage of this host's copy; records and logs the damage.

        The restore goes on, because another host may have the same data undamaged.
        """
        try:
            with self._verified.noting_damage(self.committed):
                yield
        except CorruptCheckpointError as error:
            logger.warning("this host's copy is ignored: %s", error)

    def _unreadable(self, why: str) -> CorruptCheckpointError:
        place = self.committed.path.parent  # the step itself may not exist on this host
        return CorruptCheckpointError(
            f"step {self.committed.step} of the local tier, {place}: {why}",
            step=self.committed.step,
            path=place,
        )


def _target(read: Read) -> jax.ShapeDtypeStruct:
    spec = read.spec
    return jax.ShapeDtypeStruct(spec.shape, np.dtype(spec.dtype), sharding=read.placement)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _slice_of(reads: Mapping[str, Read], axis: str) -> int:
    """Returns the index of the slice that contains this process; 0 if no mesh has ``axis``."""
    meshes = {
        read.placement.mesh for read in reads.values() if isinstance(read.placement, NamedSharding)
    }
    for mesh in sorted((m for m in meshes if axis in m.shape), key=lambda m: m.axis_names):
        here = np.isin(mesh.device_ids, [device.id for device in mesh.local_devices])
        return int(np.argwhere(here)[0][mesh.axis_names.index(axis)])
    return 0
