"""A tier of a run: a directory, what is saved to it and kept there, and the channels for that."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from torchax_ckpt import policies
from torchax_ckpt.devices.host_array import Memory
from torchax_ckpt.errors import DonatedBufferError, LeaseError
from torchax_ckpt.options import CheckpointOptions, TierName
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.processes.per_host import Keepers
from torchax_ckpt.runtime.user_messages import fields
from torchax_ckpt.saving.claim import Claim
from torchax_ckpt.saving.failures import Failures
from torchax_ckpt.saving.mirroring.mirroring import Mirroring
from torchax_ckpt.saving.preserving import Preserving
from torchax_ckpt.saving.reuse.reuse import Reuse
from torchax_ckpt.saving.run_history import RunHistory
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.run_directory import RunDirectory
from torchax_ckpt.storage.medium import seals
from torchax_ckpt.storage.writing import array_writer
from torchax_ckpt.telemetry.events import SaveCost
from torchax_ckpt.telemetry.recorder import Telemetry

logger = logging.getLogger(__name__)

_LOGGED_SAVES = 100  # in a line of the log at the level INFO


class SaveCosts:
    """The costs of a tier's durable saves, for its policy, its deadline and the log."""

    def __init__(self) -> None:
        self.longest_secs: float | None = None  # until a step was durable; None if none is
        # Those that the policy was not asked about yet: only process 0 asks, so they are bounded.
        self._unobserved: collections.deque[SaveCost] = collections.deque(maxlen=64)
        self._unlogged: list[SaveCost] = []

    def add(self, cost: SaveCost, path: Any) -> None:
        """Adds, and logs, the cost of a save that has just become durable in ``path``."""
        self.longest_secs = max(self.longest_secs or 0.0, cost.durable_secs)
        self._unobserved.append(cost)
        _log([cost], path, logging.DEBUG)
        self._unlogged.append(cost)
        if len(self._unlogged) == _LOGGED_SAVES:
            _log(self._unlogged, path, logging.INFO)
            self._unlogged.clear()

    def observed(self) -> Iterator[SaveCost]:
        """Yields, and forgets, the costs that were added since the last call."""
        while self._unobserved:
            yield self._unobserved.popleft()


def _log(costs: list[SaveCost], path: Any, level: int) -> None:
    """Logs the medians of the costs of saves; the step is that of the last one."""
    columns = zip(*map(dataclasses.astuple, costs), strict=True)
    _, blocking, durable = map(statistics.median, columns)
    text = "%s: step %d is durable (median of %d: blocked %.4f s, durable after %.3f s)"
    step = costs[-1].step
    about = fields(step=step, path=path, blocking_secs=blocking, durable_secs=durable)
    logger.log(level, text, path, step, len(costs), blocking, durable, extra=about)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tier:
    """One tier of a run, with all that its saves and its reads need.

    It has three channels between the processes of the run, each for its own threads, so that no
    thread waits for another one. In the channels of a local tier's calls and saves, each process
    does what process 0 does in the durable tier.
    """

    name: TierName
    directory: RunDirectory
    save_policy: policies.SaveDecisionPolicy
    options: CheckpointOptions
    telemetry: Telemetry
    calls_channel: Processes  # between training threads
    saves_channel: Processes  # between threads of saves
    decisions_channel: Processes  # for save decisions only
    history: RunHistory
    claim: Claim
    preserving: Preserving
    mirroring: Mirroring  # does nothing in a local tier
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
            if self.saves_channel.is_first:
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
        num_memories = 1 if self.options.max_host_bytes else 2  # with a bound, one batch at a time
        return [Memory(array_writer.STACK_BYTES) for _ in range(num_memories)]

    @functools.cached_property
    def keepers(self) -> Keepers:
        """Exchanges copies of the processes' states between the hosts of a local tier."""
        return Keepers()

    @functools.cached_property
    def texts(self) -> seals.Texts | None:
        """The texts of earlier manifests; None if each host describes its parts at each save."""
        return None if self.saves_channel.is_per_host else seals.Texts("document", "stacks")
