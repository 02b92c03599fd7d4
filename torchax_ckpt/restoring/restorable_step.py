"""A stored step whose leaves are read onto devices or the host, for a restore or load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from torchax_ckpt.devices.host_array import Local, Placement
from torchax_ckpt.devices.move_shards import put
from torchax_ckpt.runtime import host_memory
from torchax_ckpt.state import pytree
from torchax_ckpt.state.component import LeafRead
from torchax_ckpt.storage.arrays import onto_devices
from torchax_ckpt.storage.directory import step_files
from torchax_ckpt.stored.stored_step import Compared, StoredStep, about


class RestorableStep:
    """A stored step that JAX and torch can represent; else raises CorruptCheckpointError.

    ``agree`` raises if another process failed; ``read_leaves`` calls it before devices communicate.
    """

    def __init__(self, stored: StoredStep, agree: Callable[[], None] = lambda: None) -> None:
        self.stored, self._agree = stored, agree
        self.committed, self.is_whole = stored.committed, stored.is_whole
        self.document, self.attached = stored.manifest.document, stored.manifest.attached
        with about(self.committed):
            pytree.check_document(self.document)
        self._compares = stored.has_digests and stored.options.verify != "never"
        self.compared: Compared | None = None
        if stored.manifest.unchanged and self._compares:
            self.compared = Compared(stored.manifest)

    def require_plausible(self, reads: Mapping[str, LeafRead]) -> None:
        """Checks the stored arrays and this host's memory, before memory is allocated for leaves.

        Raises CorruptCheckpointError if an array contradicts the manifest, or the bytes on storage
        are too few for leaves that exceed the memory; OutOfMemoryError if they are not.
        """
        least = self.stored.require_stored(reads)
        memory = host_memory.host_memory_bytes()
        staying = {n: r.spec.nbytes for n, r in reads.items() if r.placement is Local.HOST}
        passing = {n: r.spec.nbytes for n, r in reads.items() if _is_whole_here(r.placement)}
        for sizes, total in (
            (staying, sum(staying.values())),
            (passing, max(passing.values(), default=0)),
        ):
            if total > memory:
                largest = max(sizes, key=lambda name: sizes[name])
                raise step_files.beyond_memory(self.committed, total, least, largest)

    def read_leaves(self, reads: Mapping[str, LeafRead]) -> dict[str, Any]:
        """Reads each leaf onto devices or the host, by name; call ``require_plausible`` before."""
        stored, placements = self.stored, {name: read.placement for name, read in reads.items()}
        wanted = stored.wanted(placements, compares=self._compares)
        found = onto_devices.read_leaves(
            self.committed, wanted, stored.options, self._agree, stored.stores
        )
        moved = {
            name: found.pop(name).astype(read.dtype)
            for name, read in reads.items()
            if read.dtype is not None and name in found
        }
        for name in stored.manifest.plan.empty.intersection(reads):
            spec = reads[name].spec
            moved[name] = np.zeros(spec.shape, np.dtype(reads[name].dtype or spec.dtype))
        found |= put(moved, {name: placements[name] for name in moved})
        if self.compared is not None:
            self.compared.leaves.update(found)
        return found


def _is_whole_here(placement: Placement) -> bool:
    """Returns whether the whole leaf passes through host memory on its way to devices."""
    return placement is not Local.HOST and (
        isinstance(placement, Local) or placement.is_fully_replicated
    )
