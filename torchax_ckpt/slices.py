"""Owns restoring from the steps that hosts have saved for themselves, each what its devices hold.

Slices hold the same, so what one host has lost another still has: the one at its place in another
slice. Which part of the state that is follows from the shardings, not from process numbers, which
may be given out anew. Each part is read by the first host that has it undamaged, and goes over the
device network to those that have not; nothing goes to storage, and where all hosts have their own,
nothing goes anywhere.

On the way values are integers of their bits, added to zeros: sums of floats would lose the sign of
zeros and the bits of NaNs, and those of narrow integers would be wide.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from torchax_ckpt import content, parts
from torchax_ckpt.bits import sums, to_bits
from torchax_ckpt.errors import CorruptCheckpointError
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.sharding import from_host_part, put, shards_of, spans_hosts
from torchax_ckpt.state.component import Read
from torchax_ckpt.state.leaf import Spec
from torchax_ckpt.state.own import Own
from torchax_ckpt.storage.apart import Apart
from torchax_ckpt.storage.commits import CommittedStep
from torchax_ckpt.storage.verified import Verified

logger = logging.getLogger(__name__)

# Arrays that go to other slices in one compiled call.
_CHUNK = 64


class HostSteps:
    """One step, of which every host may have what its devices held; a source for a restore.

    Use it in a round, on all processes.

    Args:
      committed: the step, where this host would have it.
      options: how it is read.
      index: of this process.
      processes: of the run.
      replica_axis: the mesh axis along which slices lie.
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
        processes: Apart,
        replica_axis: str,
        verified: Verified,
    ) -> None:
        self.committed = committed
        self._verified = verified
        self._options = dataclasses.replace(options, single_replica_restore=False)
        self._index = index
        self._processes = processes
        self._axis = replica_axis
        self._mine: content.StoredLeaves | None = None
        if committed.path.exists():
            with self._left_aside():
                self._mine = content.StoredLeaves(committed, self._options, allow_part=True)
        said: list[Any] = []
        if self._mine is not None:
            said = [parts.whole(self._mine.document), parts.specs(self._mine.document)]
        self.document: Mapping[str, Node]
        self.document, self._specs = self._from_first(self._mine is not None, said)

    def require_plausible(self, reads: Mapping[str, Read]) -> None:
        """Refuses what is not stored as the manifest says; of this host, which then counts as one
        that has nothing.
        """
        if self._mine is None:
            return
        reads = parts.as_saved(reads, self._specs)
        try:
            held, needed = parts.held(self._mine.document), parts.needed(reads)
        except ValueError as error:  # not over a mesh, or not one block of it on each host
            raise self._lost(str(error)) from error
        mine, self._mine = self._mine, None
        if others := [n for n in reads if held.get(n) not in (None, needed.get(n))]:
            text = "%s holds other parts of %d leaves than this host needs now: %s"
            logger.warning(text, self.committed.path, len(others), ", ".join(others[:3]))
            return
        with self._left_aside():
            mine.require_plausible({**reads, **parts.of_reads(reads, mine.document)})
            self._mine = mine

    def is_whole(self, reads: Mapping[str, Read], num_processes: int) -> bool:
        """Whether these reads, checked, have seen every stored byte of this host's step."""
        return self._mine is not None and self._mine.is_whole(reads, num_processes)

    def read(self, reads: Mapping[str, Read]) -> dict[str, Any]:
        """Reads leaves, from this host's step or by way of another's, onto their placements."""
        asked, reads = reads, parts.as_saved(reads, self._specs)
        spanning = {
            name: reads[name] for name in sorted(reads) if spans_hosts(reads[name].placement)
        }
        values: dict[str, Any] | None = None
        if self._mine is not None:
            with self._left_aside():
                mine = parts.of_reads(reads, self._mine.document)
                values = self._mine.read({**reads, **mine})
        if values is None:
            self._mine = None  # what comes from other hosts says nothing of this one's copy
        here = {name: read for name, read in reads.items() if name not in spanning}
        found = self._of_parts(spanning, values)
        moved = {n: a for n, a in found.items() if asked[n].placement != reads[n].placement}
        if moved:
            targets = tuple(asked[name].placement for name in moved)
            whole = jax.jit(lambda *arrays: arrays, out_shardings=targets)(*moved.values())
            found.update(zip(moved, whole, strict=True))
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
                hosts = self._mine.read(parts.on_host(self._mine.document, wanted))
                found = Own({}, hosts).to_bytes()
            sent = Own.of_bytes(self._bytes_from_first(found)).leaves
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
            raise self._lost("no host has it undamaged")
        first = next(index for index, said in enumerate(has_it) if said)
        mine = value if value is not None and first == self._index else b""
        return self._processes.gather(mine)[first]

    # --- what is spread over hosts ---

    def _of_parts(self, reads: Mapping[str, Read], values: dict[str, Any] | None) -> dict[str, Any]:
        place = [parts.needed(reads), _columns(reads, self._axis)]
        needed = hashlib.sha256(json.dumps(place).encode()).hexdigest()
        mine = json.dumps([needed, values is not None]).encode()
        told = [json.loads(sent) for sent in self._processes.gather(mine)]
        sources = {part: i for i, (part, has_it) in reversed(list(enumerate(told))) if has_it}
        if any(part not in sources for part, _ in told):
            lost = [i for i, (part, _) in enumerate(told) if part not in sources]
            raise self._lost(f"no host has what processes {lost} need")
        logger.info(
            "step %d: processes %s restore from their own hosts, the others from these",
            self.committed.step,
            [i for i, (_, has_it) in enumerate(told) if has_it],
        )
        if all(has_it for _, has_it in told):
            assert values is not None
            return {
                name: from_host_part(values[name], read.placement, read.spec.shape)  # type: ignore[arg-type]
                for name, read in reads.items()
            }
        is_source = sources[needed] == self._index
        return broadcast(reads, values if is_source else None, self._axis, self._lost)

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


def broadcast(
    reads: Mapping[str, Read],
    values: Mapping[str, Any] | None,
    axis: str,
    lost: Callable[[str], Exception],
) -> dict[str, Any]:
    """Sends parts to the hosts at the same place of other slices. On the training thread.

    Args:
      reads: leaf -> what is read, on a mesh that has the axis.
      values: leaf -> this host's part; None on all hosts but one for each part.
      axis: of the mesh, along which slices lie.
      lost: makes the error to raise.
    """
    shardings = {name: _named(read) for name, read in reads.items()}
    for name, sharding in shardings.items():
        mesh = sharding.mesh
        if axis not in mesh.shape or mesh.local_mesh.shape[axis] != 1:
            raise lost(
                f"{name}: expected a mesh with an axis {axis!r} along which every host lies in one "
                f"slice, found {dict(mesh.shape)}; LocalTier(replica_axis=...) names the axis"
            )
    found: dict[str, Any] = {}
    names = list(reads)
    for start in range(0, len(names), _CHUNK):
        chunk = names[start : start + _CHUNK]
        stacks = []
        for name in chunk:
            value = None if values is None else values[name]
            stacks.append(_beside_zeros(shardings[name], reads[name].spec, value, axis))
        targets = tuple(shardings[name] for name in chunk)
        dtypes = tuple(reads[name].spec.dtype for name in chunk)
        found.update(zip(chunk, _merge(dtypes, targets, stacks), strict=True))
    return found


def _columns(reads: Mapping[str, Read], axis: str) -> list[list[list[int]]]:
    """Where on each mesh this host's devices lie, but for the axis along which parts are sent.

    Hosts of one slice may hold the same part of everything, and yet none gets it from another.
    """
    found = set()
    for mesh in {_named(read).mesh for read in reads.values()}:
        if axis not in mesh.shape:
            continue  # nothing is sent on it
        here = np.isin(mesh.device_ids, [device.id for device in mesh.local_devices])
        across = np.any(here, axis=mesh.axis_names.index(axis))
        found.add(tuple(map(tuple, np.argwhere(across).tolist())))
    return [list(map(list, columns)) for columns in sorted(found)]


def _named(read: Read) -> NamedSharding:
    assert isinstance(read.placement, NamedSharding), "or it would have no part on a host"
    return read.placement


def _beside_zeros(
    sharding: NamedSharding, spec: Spec, value: jax.Array | None, axis: str
) -> jax.Array:
    """The array with a leading axis of slices: the bits of this one's part, or zeros."""
    shape, dtype = spec.shape, np.dtype(spec.dtype)
    stacked = NamedSharding(sharding.mesh, PartitionSpec(axis, *sharding.spec))
    empty = jax.eval_shape(to_bits, jax.ShapeDtypeStruct(sharding.shard_shape(shape), dtype))
    given = {} if value is None else {s.device: s.data for s in shards_of(value)}
    shards = [
        jnp.expand_dims(to_bits(given[device]), 0)
        if device in given
        else jax.device_put(np.zeros((1, *empty.shape), empty.dtype), device)
        for device in stacked.addressable_devices
    ]
    num_slices = sharding.mesh.shape[axis]
    whole = jax.eval_shape(to_bits, jax.ShapeDtypeStruct(shape, dtype)).shape
    return jax.make_array_from_single_device_arrays((num_slices, *whole), stacked, shards)


def _merge(
    dtypes: tuple[str, ...], targets: tuple[NamedSharding, ...], stacks: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """The sums over slices, on all of them, as what their bits mean."""

    return jax.jit(lambda *given: sums(given, dtypes), out_shardings=targets)(*stacks)
