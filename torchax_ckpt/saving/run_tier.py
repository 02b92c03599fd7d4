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
    """One tier and its parts.

    Attributes:
      name: "durable" or "local".
      directory: the directory of the steps.
      history: the steps of this run.
      saver: writes the steps.
      decisions: decides which steps are saved.
      telemetry: records events.
      processes: the processes of the run, for messages about this tier between training threads.
      reuse: knows what earlier steps store; None if every save writes all arrays.
    """

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
        """Records that this run restored a step of this tier.

        Args:
          committed: the step.
          compared: the leaves that the restore has compared; see ``StoredStep``.
          is_verified: whether the restore compared every stored byte of the step with its digest.
        """
        if is_verified:
            self.directory.verified.note(committed, is_sound=True)
        if self.reuse is not None:
            self.reuse.adopt(committed, is_verified=is_verified)
        self.loaded(committed, compared)

    def loaded(self, committed: CommittedStep, compared: Compared | None) -> None:
        """Records that this run read a step of this tier; ``compared`` as for ``restored``."""
        if self.reuse is not None and compared is not None:
            self.reuse.read(committed, compared)
