"""Restoring from the steps that hosts have saved for themselves, each what its devices hold.

Slices hold the same, so what one host has lost another still has: the one at its place in another
slice. And hosts may come back at other places of the mesh than they had: which part of the state a
host holds stands in its step, and which part it needs follows from the shardings. Each host reads
what it holds, and who needs another part gets it over the device network from one that has it;
nothing goes to storage, and where all hosts have their own, nothing goes anywhere. What is sharded
otherwise now than it was is put together as it was, and then moved by the devices.
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
    """One step, of which every host may have what its devices held; a source for a restore.

    Use it in a round, on all processes.

    Args:
      committed: the step, where this host would have it.
      options: how it is read.
      index: of this process.
      processes: of the run.
      replica_axis: the mesh axis along which slices lie: a part comes from the own one, if it can.
      verified: is told if this host's copy is damaged; that of another says nothing of it.

    Raises:
      CorruptCheckpointError: no host can read its manifest.
      ForeignCheckpointError: it was not written by this package.
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
        self._mine: step_reader.StoredLeaves | None = None
        if committed.path.exists():
            with self._left_aside():
                self._mine = step_reader.StoredLeaves(committed, self._options, allow_part=True)
        said: list[Any] = []
        if self._mine is not None:
            said = [host_shards.whole(self._mine.document), host_shards.specs(self._mine.document)]
        self.document: Mapping[str, Node]
        self.document, self._specs = self._from_first(self._mine is not None, said)

    def require_plausible(self, reads: Mapping[str, Read]) -> None:
        """Refuses what is not stored as the manifest says; of this host, which then counts as one
        that has nothing.
        """
        if self._mine is None:
            return
        reads = host_shards.as_saved(reads, self._specs)
        self._needed(reads)
        mine, self._mine = self._mine, None
        try:
            host_shards.held(reads, mine.document)
        except ValueError as error:
            logger.warning("%s is of no use here: %s", self.committed.path, error)
            return
        with self._left_aside():
            mine.require_plausible({**reads, **host_shards.of_reads(reads, mine.document)})
            self._mine = mine

    def is_whole(self, reads: Mapping[str, Read], num_processes: int) -> bool:
        """Whether these reads, checked, have seen every stored byte of this host's step."""
        return self._mine is not None and self._mine.is_whole(reads, num_processes)

    def read(self, reads: Mapping[str, Read]) -> dict[str, Any]:
        """Reads leaves, from this host's step or by way of another's, onto their placements."""
        asked, reads = reads, host_shards.as_saved(reads, self._specs)
        spanning = {
            name: reads[name] for name in sorted(reads) if spans_hosts(reads[name].placement)
        }
        values: dict[str, Any] | None = None
        if self._mine is not None:
            with self._left_aside():
                mine = host_shards.of_reads(reads, self._mine.document)
                values = self._mine.read({**reads, **mine})
        if values is None:
            self._mine = None  # what comes from other hosts says nothing of this one's copy
        here = {name: read for name, read in reads.items() if name not in spanning}
        found = self._of_parts(spanning, values)
        is_moved = [n for n in found if asked[n].placement != reads[n].placement]
        reshard(found, {name: _target(asked[name]) for name in is_moved})
        return {**self._of_one(here, values), **found}

    # --- what is the same on all hosts ---

    def _of_one(self, reads: Mapping[str, Read], values: dict[str, Any] | None) -> dict[str, Any]:
        """Leaves of single hosts: each host's step has those of all."""
        lacking = [] if values is not None else sorted(reads)
        asked = [json.loads(sent) for sent in self._processes.gather(json.dumps(lacking).encode())]
        wanted = sorted({name for names in asked for name in names})
        if wanted:
            found = None
            if values is not None and self._mine is not None:
                hosts = self._mine.read(host_shards.on_host(self._mine.document, wanted))
                found = PerProcessState({}, hosts).to_bytes()
            sent = PerProcessState.of_bytes(self._bytes_from_first(found)).leaves
            if values is None:
                placements = {name: read.placement for name, read in reads.items()}
                return put({name: np.array(sent[name]) for name in reads}, placements)
        return {} if values is None else {name: values[name] for name in reads}

    def _from_first(self, has_it: bool, value: Any) -> Any:
        """A JSON value of the first process that has one, on all."""
        sent = json.dumps(value).encode() if has_it else None
        return json.loads(self._bytes_from_first(sent))

    def _bytes_from_first(self, value: bytes | None) -> bytes:
        has_it = self._processes.gather(b"" if value is None else b"1")
        if not any(has_it):
            raise self._lost(
                "no host has it undamaged, and as it is wanted: whole leaves are on no host alone; "
                "give an abstract_state with shardings over all hosts"
            )
        first = next(index for index, said in enumerate(has_it) if said)
        mine = value if value is not None and first == self._index else b""
        return self._processes.gather(mine)[first]

    # --- what is spread over hosts ---

    def _of_parts(self, reads: Mapping[str, Read], values: dict[str, Any] | None) -> dict[str, Any]:
        held = None
        if values is not None and self._mine is not None:
            held = _digest(host_shards.held(reads, self._mine.document))
        place = _slice_of(reads, self._axis)
        mine = json.dumps([_digest(self._needed(reads)), held, place]).encode()
        told = [json.loads(sent) for sent in self._processes.gather(mine)]
        needs, holds, slices = zip(*told, strict=True)
        try:
            rounds = routes(needs, holds, slices)
        except LookupError:
            lost = [i for i, part in enumerate(needs) if part not in holds]
            raise self._lost(f"no host has what processes {lost} need") from None
        logger.info(
            "step %d: processes %s restore from their own hosts, the others from these or each "
            "other's",
            self.committed.step,
            [i for i, part in enumerate(needs) if part == holds[i]],
        )
        if rounds:
            found = {} if values is None else {name: values[name] for name in reads}
            try:
                permute_over_processes(found, {n: _target(r) for n, r in reads.items()}, rounds)
            except ValueError as error:
                raise self._lost(str(error)) from error
            return found
        assert values is not None
        return {
            name: shards_as(values[name], read.placement, read.spec.shape)  # type: ignore[arg-type]
            for name, read in reads.items()
        }

    def _needed(self, reads: Mapping[str, Read]) -> dict[str, list[list[int]]]:
        try:
            return host_shards.needed(reads)
        except ValueError as error:
            raise self._lost(str(error)) from error

    @contextlib.contextmanager
    def _left_aside(self) -> Iterator[None]:
        """Says damage, and goes on: another host may have the same, undamaged."""
        try:
            with self._verified.noting_damage(self.committed):
                yield
        except CorruptCheckpointError as error:
            logger.warning("this host's copy is left aside: %s", error)

    def _lost(self, why: str) -> CorruptCheckpointError:
        place = self.committed.path.parent  # the step itself may not lie on this host
        return CorruptCheckpointError(
            f"step {self.committed.step} of the local tier, {place}: {why}",
            step=self.committed.step,
            path=place,
        )


def _target(read: Read) -> jax.ShapeDtypeStruct:
    spec = read.spec
    return jax.ShapeDtypeStruct(spec.shape, np.dtype(spec.dtype), sharding=read.placement)


def _digest(told: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _slice_of(reads: Mapping[str, Read], axis: str) -> int:
    """The slice in which this process lies; 0 for all where there is no such axis."""
    meshes = {
        read.placement.mesh for read in reads.values() if isinstance(read.placement, NamedSharding)
    }
    for mesh in sorted((m for m in meshes if axis in m.shape), key=lambda m: m.axis_names):
        here = np.isin(mesh.device_ids, [device.id for device in mesh.local_devices])
        return int(np.argwhere(here)[0][mesh.axis_names.index(axis)])
    return 0
