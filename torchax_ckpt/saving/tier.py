"""A tier of a run: a directory, what is saved to it and kept there, and the channels for that."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable

from torchax_ckpt import policies
from torchax_ckpt.devices.host_array import Memory
from torchax_ckpt.errors import DonatedBufferError, LeaseError
from torchax_ckpt.options import CheckpointOptions, TierName
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.processes.per_host import Keepers
from torchax_ckpt.saving.claim import Claim
from torchax_ckpt.saving.failures import Failures
from torchax_ckpt.saving.preserving import Preserving
from torchax_ckpt.saving.reuse.reuse import Reuse
from torchax_ckpt.saving.run_history import RunHistory
from torchax_ckpt.saving.save_in_flight import SaveCosts
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import seals
from torchax_ckpt.storage.writing import fetching
from torchax_ckpt.telemetry.recorder import Telemetry

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tier:
    """One tier of a run, with all that its saves and its reads need.

    It has three channels between the processes of the run, each for its own threads, so that no
    thread waits for another one. In a local tier, each process does in ``calls`` and ``saves`` what
    process 0 does in the durable tier.
    """

    name: TierName
    directory: RunDirectory
    save_policy: policies.SaveDecisionPolicy
    options: CheckpointOptions
    telemetry: Telemetry
    calls: Processes  # between training threads
    saves: Processes  # between threads of saves
    decisions: Processes  # for save decisions only
    history: RunHistory
    claim: Claim
    preserving: Preserving
    reuse: Reuse
    failures: Failures
    on_donated: Callable[[], None]
    """Called if a save fails because a buffer that it held by reference was donated."""
    costs: SaveCosts = dataclasses.field(default_factory=SaveCosts)

    @property
    def is_local(self) -> bool:
        """Whether this is the local tier."""
        return self.name == "local"

    def fail(
        self,
        step: int,
        error: BaseException,
        committed: CommittedStep | None = None,
        *,
        age_secs: float = 0.0,
    ) -> None:
        """Does what ``undo`` does, reports the failure, and cleans up the directory."""
        self.undo(step, committed)
        if isinstance(error, DonatedBufferError):
            self.on_donated()
        self.failures.of_save(step, error, age_secs)
        if isinstance(error, LeaseError):
            self.claim.lose()
            return
        try:
            if self.saves.is_first:
                self.directory.recover()  # now, because a full disk needs the space
        except Exception as problem:
            logger.debug("leftovers of the failed save stay until the next save: %s", problem)

    def undo(self, step: int, committed: CommittedStep | None = None) -> None:
        """Makes a failed save count as no step, also if it has ``committed`` one."""
        self.claim.clean_up_later(has_failed=True)
        self.history.fail(step, committed)

    # --- what saves use one after another ---

    @functools.cached_property
    def memories(self) -> list[Memory]:
        """The memory in which stacks are made on the host."""
        num_memories = 1 if self.options.max_host_bytes else 2  # with a bound, batches wait
        return [Memory(fetching.STACK_BYTES) for _ in range(num_memories)]

    @functools.cached_property
    def keepers(self) -> Keepers:
        """Exchanges copies of the processes' states between the hosts of a local tier."""
        return Keepers()

    @functools.cached_property
    def texts(self) -> seals.Texts | None:
        """The texts of earlier manifests; None if each host describes its parts at each save."""
        return None if self.saves.is_per_host else seals.Texts("document", "stacks")
