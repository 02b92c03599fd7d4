"""The reader of steps: checks a step's manifest, and reads leaves onto devices or the host."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from torchax_ckpt.errors import CheckpointError
from torchax_ckpt.layout import names
from torchax_ckpt.layout.manifest import Manifest, Node
from torchax_ckpt.options import CheckpointOptions
from torchax_ckpt.runtime import host_memory
from torchax_ckpt.snapshot.move_shards import put
from torchax_ckpt.snapshot.sharding import Local, Placement
from torchax_ckpt.state import node_checks, per_process_state
from torchax_ckpt.state.component import Read
from torchax_ckpt.storage.arrays import array_checks, read_arrays
from torchax_ckpt.storage.arrays.placement import Wanted
from torchax_ckpt.storage.directory import step_files
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.medium import containment
from torchax_ckpt.stored.stored_step import about, digests_of, parse_manifest, require_whole

logger = logging.getLogger(__name__)


def read_manifest(committed: CommittedStep) -> Manifest:
    """Returns a step's manifest, after checking that JAX and torch can represent all its leaves.

    JAX and torch must support the dtype, and the random key type if any, that the manifest records
    for each leaf.

    Raises:
      ForeignCheckpointError: the step has no manifest, because Orbax alone wrote it.
      CorruptCheckpointError: this package cannot have written the manifest.
    """
    manifest = parse_manifest(committed)
    require_made(committed, manifest)
    return manifest


def require_made(committed: CommittedStep, manifest: Manifest) -> None:
    """Raises CorruptCheckpointError unless JAX and torch can represent all leaves of a step.

    JAX and torch must support the dtype, and the random key type if any, that the manifest records
    for each leaf.
    """
    with about(committed):
        node_checks.check_document(manifest.document)


@dataclasses.dataclass(frozen=True)
class Compared:
    """The leaves that were read from a step and compared with its digests.

    Attributes:
      manifest: the manifest of the step.
      references: name -> reference, for the leaves that became JAX arrays.
    """

    manifest: Manifest
    references: dict[str, weakref.ref[jax.Array]] = dataclasses.field(default_factory=dict)


class Source(Protocol):
    """The interface of a step from which leaves are read: ``StoredLeaves`` or ``HostSteps``.

    Attributes:
      committed: the step.
      document: component -> node.
      compared: the leaves that ``read`` has compared with the digests of the whole step, if other
        steps may share its arrays; else None.
    """

    committed: CommittedStep
    document: Mapping[str, Node]
    compared: Compared | None

    def require_plausible(self, reads: Mapping[str, Read]) -> None:
        """Checks the stored arrays against the manifest. Callers call this before ``read``."""

    def read(self, reads: Mapping[str, Read]) -> dict[str, Any]:
        """Reads each leaf onto its devices or the host; returns leaf name -> array."""

    def is_whole(self, reads: Mapping[str, Read], num_processes: int) -> bool:
        """Returns whether a restore with ``reads`` reads every stored byte of the step."""


class StoredLeaves:
    """A step that is read directly from its directory.

    Attributes:
      committed: the step.
      document: component -> node.

    Args:
      committed: the step.
      options: how the step is read.
      agree: raises if another process has failed.
      allow_part: whether the step may have one host's part of the state, as in a local tier.

    Raises:
      ForeignCheckpointError: as for ``read_manifest``.
      CorruptCheckpointError: as for ``read_manifest``; or the step has one host's part of the
        state, and ``allow_part`` is False.
    """

    def __init__(
        self,
        committed: CommittedStep,
        options: CheckpointOptions,
        agree: Callable[[], None] = lambda: None,
        *,
        allow_part: bool = False,
    ) -> None:
        self.committed = committed
        self._agree = agree
        self._manifest = read_manifest(committed)
        if not allow_part:
            require_whole(committed, self._manifest)
        self._options = options
        self.document = self._manifest.document
        self.compared: Compared | None = None
        if self._manifest.unchanged and options.verify != "never":
            self.compared = Compared(self._manifest)

    def require_plausible(self, reads: Mapping[str, Read]) -> None:
        """See the module's function ``require_plausible``."""
        require_plausible(self.committed, self._manifest, reads)

    def read(self, reads: Mapping[str, Read]) -> dict[str, Any]:
        """See ``read_leaves``."""
        found = read_leaves(self.committed, self._manifest, reads, self._options, self._agree)
        if self.compared is not None:
            arrays = {n: array for n, array in found.items() if isinstance(array, jax.Array)}
            self.compared.references.update({n: weakref.ref(a) for n, a in arrays.items()})
        return found

    def is_whole(self, reads: Mapping[str, Read], num_processes: int) -> bool:
        """See the module's function ``is_whole``; reads the assets, which no restore uses."""
        if not is_whole(self._manifest, reads, num_processes):
            return False
        try:
            step_files.read_assets(self.committed, self._manifest.assets)
        except CheckpointError as error:  # the restored state is intact all the same
            logger.warning("%s", error)
            return False
        return True


def require_plausible(
    committed: CommittedStep, manifest: Manifest, reads: Mapping[str, Read]
) -> None:
    """Raises if stored arrays contradict the manifest, or the leaves exceed this host's memory.

    Call ``require_plausible`` before allocating memory for the leaves.

    Raises:
      CorruptCheckpointError: an array does not exist, has another dtype or shape, or has a layout
        that this package does not write; or the leaves exceed this host's memory, and the bytes on
        storage are too few to expand to the leaves' size.
      OutOfMemoryError: the leaves exceed this host's memory, and nothing shows damage of the step.
    """
    stored = manifest.stored(reads)
    with step_files.as_corrupt(committed, "array metadata"):
        least = array_checks.require_stored(committed.path, committed.step, stored)
    memory = host_memory.host_memory_bytes()
    staying = {n: r.spec.nbytes for n, r in reads.items() if r.placement is Local.HOST}
    passing = {n: r.spec.nbytes for n, r in reads.items() if _is_whole_here(r.placement)}
    for sizes, total in (
        (staying, sum(staying.values())),
        (passing, max(passing.values(), default=0)),
    ):
        if total > memory:
            largest = max(sizes, key=lambda name: sizes[name])
            path, step = committed.path, committed.step
            raise containment.beyond_memory(path, step, total, least, largest)


def _is_whole_here(placement: Placement) -> bool:
    """Returns whether the whole leaf passes through host memory on its way to devices."""
    return placement is not Local.HOST and (
        isinstance(placement, Local) or placement.is_fully_replicated
    )


def is_whole(manifest: Manifest, reads: Mapping[str, Read], num_processes: int) -> bool:
    """Returns whether a restore with ``reads`` reads every stored byte of the step.

    ``reads`` are the reads of one process. ``is_whole`` also counts the corresponding reads of the
    other processes in the same restore.
    """
    needed = set(manifest.leaves())
    # If as many processes read as saved, each process reads its own per-process state.
    if per_process_state.count_of(manifest.document) == num_processes:
        needed = {name for name in needed if names.without_process(name) == name}
        reads = {names.without_process(name): read for name, read in reads.items()}
    if needed <= reads.keys():
        return True
    return manifest.stored(needed).keys() <= manifest.stored(reads).keys()


def read_leaves(
    committed: CommittedStep,
    manifest: Manifest,
    reads: Mapping[str, Read],
    options: CheckpointOptions,
    agree: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Reads each leaf onto its devices or the host; returns leaf name -> array.

    Args:
      committed: the step.
      manifest: the step's manifest.
      reads: name -> the leaf to read and its placement.
      options: ``verify`` and the memory bounds.
      agree: raises if another process has failed.

    Raises:
      CorruptCheckpointError: a leaf is not stored as the manifest says.
    """
    located = manifest.plan.locate()
    stacks: dict[str, dict[str, Placement]] = {}
    wanted: dict[str, Wanted] = {}
    empty: dict[str, Any] = {}
    for name, read in reads.items():
        shape, dtype = read.spec.shape, read.spec.dtype
        if name in manifest.plan.empty:
            empty[name] = np.zeros(shape, np.dtype(dtype))
        elif name not in located:
            known = None if options.verify == "never" else digests_of(manifest, name)
            wanted[name] = Wanted(shape, dtype, {name: read.placement}, known)
        else:
            stored, _ = located[name]
            if stored not in stacks:
                stacks[stored] = {}
                members = manifest.plan.stacks[stored]
                known = None if options.verify == "never" else digests_of(manifest, stored)
                wanted[stored] = Wanted(
                    (len(members), *shape), dtype, stacks[stored], known, members
                )
            stacks[stored][name] = read.placement
    leaves = read_arrays.read_arrays(committed, wanted, options, agree)
    return {**leaves, **put(empty, {name: reads[name].placement for name in empty})}
