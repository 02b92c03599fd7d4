"""A tier of a run: a directory, what is saved to it and kept there, and the channels for that."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from torchax_ckpt import policies
from torchax_ckpt.devices.host_array import Memory
from torchax_ckpt.options import CheckpointOptions, TierName
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.processes.per_host import Keepers
from torchax_ckpt.saving.claim import Claim
from torchax_ckpt.saving.failures import Failures
from torchax_ckpt.saving.preserving import Preserving
from torchax_ckpt.saving.run_history import RunHistory
from torchax_ckpt.saving.save_in_flight import SaveCosts
from torchax_ckpt.saving.unchanged.reuse import Reuse
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import seals
from torchax_ckpt.storage.writing import fetching
from torchax_ckpt.stored.stored_step import Compared
from torchax_ckpt.telemetry.recorder import Telemetry


@dataclasses.dataclass(frozen=True)
class Channels:
    """The channels of one tier between the processes of a run.

    Each has its own threads, so that no thread waits for another one. In a local tier, each process
    does in ``calls`` and ``saves`` what process 0 does in the durable tier.
    """

    calls: Processes  # between training threads
    saves: Processes  # between threads of saves
    decisions: Processes  # for save decisions only


@dataclasses.dataclass(frozen=True)
class Tier:
    """One tier of a run, with all that its saves and its reads need."""

    name: TierName
    directory: RunDirectory
    save_policy: policies.SaveDecisionPolicy
    options: CheckpointOptions
    telemetry: Telemetry
    channels: Channels
    history: RunHistory
    preserving: Preserving
    reuse: Reuse
    on_donated: Callable[[], None]
    """Called if a save fails because a buffer that it held by reference was donated."""
    costs: SaveCosts = dataclasses.field(default_factory=SaveCosts)

    @property
    def calls(self) -> Processes:
        """The channel between training threads."""
        return self.channels.calls

    @property
    def saves(self) -> Processes:
        """The channel between threads of saves."""
        return self.channels.saves

    @property
    def is_local(self) -> bool:
        """Whether this is the local tier."""
        return self.name == "local"

    @functools.cached_property
    def claim(self) -> Claim:
        """This program's claim to the directory."""
        parts = self.directory, self.history, self.telemetry, self.failures
        return Claim(*parts, self.calls)

    @functools.cached_property
    def failures(self) -> Failures:
        """What failed, and which of it no call has raised yet."""
        return Failures(self.directory.path, self.telemetry, is_local=self.is_local)

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

    # --- reads ---

    def restored(
        self, committed: CommittedStep, compared: Compared | None, *, is_verified: bool
    ) -> None:
        """Records that this run restored a step of this tier, having compared these leaves."""
        if is_verified:
            self.directory.verified.note(committed, is_sound=True)
        self.reuse.restored(committed, compared)
