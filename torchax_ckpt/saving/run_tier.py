"""One tier of a run, and the parts that save to it."""

from __future__ import annotations

import dataclasses

from torchax_ckpt.options import TierName
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.saving.decisions import Decisions
from torchax_ckpt.saving.saver import Saver
from torchax_ckpt.saving.unchanged.reuse import Reuse
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.directory.run_history import RunHistory
from torchax_ckpt.stored.stored_step import Compared
from torchax_ckpt.telemetry.recorder import Telemetry


@dataclasses.dataclass(frozen=True)
class RunTier:
    """One tier and its parts. Its ``processes`` are a channel between training threads."""

    name: TierName
    directory: RunDirectory
    history: RunHistory
    saver: Saver
    decisions: Decisions
    telemetry: Telemetry
    processes: Processes
    reuse: Reuse | None

    def restored(
        self, committed: CommittedStep, compared: Compared | None, *, is_verified: bool
    ) -> None:
        """Records that this run restored a step of this tier, having compared these leaves."""
        if is_verified:
            self.directory.verified.note(committed, is_sound=True)
        if self.reuse is not None:
            self.reuse.restored(committed, compared)

    def loaded(self, committed: CommittedStep, compared: Compared | None) -> None:
        """Records that this run read a step of this tier; ``compared`` as for ``restored``."""
        if self.reuse is not None:
            self.reuse.loaded(committed, compared)
