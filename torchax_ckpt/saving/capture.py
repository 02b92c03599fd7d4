"""The captured state that one save writes, as it was when ``save`` was called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torchax_ckpt.errors import CheckpointError, DonatedBufferError
from torchax_ckpt.layout.manifest import Node
from torchax_ckpt.saving.reuse.frozen_leaves import Frozen
from torchax_ckpt.saving.reuse.known import SameObjects
from torchax_ckpt.snapshot.snapshotter import Snapshot, require_alive
from torchax_ckpt.state.per_process_state import PerProcessState
from torchax_ckpt.storage.directory.assets import Assets


@dataclasses.dataclass(frozen=True)
class Capture:
    """A captured state, and what else a save stores with it."""

    step: int
    snapshot: Snapshot
    document: Mapping[str, Node]
    per_process: PerProcessState | None  # None in a run of one process
    # may wait for devices; returns the metrics, and why they cannot be ranked, or None
    fetch_metrics: Callable[[], tuple[dict[str, Any], CheckpointError | None]]
    began: float  # ``time.perf_counter()`` on the training thread
    frozen: Frozen = dataclasses.field(default_factory=Frozen)
    # what is not in ``snapshot``, because its values are known
    same: SameObjects = dataclasses.field(default_factory=SameObjects)
    assets: Assets | None = None
    attached: tuple[str, ...] | None = None  # see ``Manifest``
    reports_metrics: bool = True  # whether this save, of those to all tiers, says why

    def explained(self, error: BaseException) -> BaseException:
        """Returns the error, or a DonatedBufferError naming the leaf if a donation caused it."""
        if "has been deleted" in str(error):
            try:
                self.snapshot.require_alive()
                require_alive(self.same.leaves.items())
            except DonatedBufferError as donated:
                return donated.with_traceback(None)
        return error

    def state(self, document: Mapping[str, Node]) -> bytes:
        """Returns this process's per-process state with its nodes; b"" in a run of one process."""
        if self.per_process is None:
            return b""
        nodes = {name: document[name] for name in self.per_process.nodes}
        return dataclasses.replace(self.per_process, nodes=nodes).to_bytes()
