"""The tiers of a run, and the steps that they have together.

On several processes, each host has a local tier of its own. What is found there is compared, so
that all processes see the same steps.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torchax_ckpt.errors import TierError
from torchax_ckpt.options import TierName
from torchax_ckpt.processes.coordination import Processes
from torchax_ckpt.saving.tier import Tier
from torchax_ckpt.storage.directory import committed_step
from torchax_ckpt.storage.directory.abandonment import Key
from torchax_ckpt.storage.directory.committed_step import CommittedStep
from torchax_ckpt.storage.directory.lineage import Branch, Lineage


class Tiers:
    """The tiers of a run; iteration yields the durable one, then the local one if there is one."""

    def __init__(self, tiers: Sequence[Tier], processes: Processes) -> None:
        self._tiers, self._processes = tiers, processes

    def __iter__(self) -> Iterator[Tier]:
        return iter(self._tiers)

    @property
    def _shared_out(self) -> Tier | None:
        """The local tier, if several processes have parts of it."""
        return next((t for t in self if t.is_local and self._processes.count > 1), None)

    def named(self, name: TierName | None) -> list[Tier]:
        """Returns one tier or all; raises TierError if there is no tier of this name."""
        tiers = [tier for tier in self if name in (None, tier.name)]
        if not tiers:
            raise TierError(
                f"tier: expected one of {', '.join(t.name for t in self)}, found {name!r}; "
                "a local tier is given as TorchaxCheckpointer(directory, local=LocalTier(path))"
            )
        return tiers

    def holding(self, committed: CommittedStep) -> Tier:
        """Returns the tier whose directory contains the given step."""
        return next(t for t in self if t.directory.path == committed.path.parent)

    # --- steps that all processes see ---

    def candidates(
        self, step: int | None = None, name: TierName | None = None
    ) -> list[CommittedStep]:
        """Returns all ``steps``, or those of one number; raises StepNotFoundError without any."""
        paths = [tier.directory.path for tier in self.named(name)]
        # A program that keeps one step may replace it while its directory is being listed.
        return committed_step.chosen(self.steps(name) or self.steps(name), step, paths)

    def steps(self, name: TierName | None = None) -> list[CommittedStep]:
        """Returns the steps of one tier or all, ascending; of equal steps, the local one last."""
        tiers, (local_steps, _) = self.named(name), self.compare_local_steps()
        found: list[CommittedStep] = []
        for tier in tiers:
            if tier is self._shared_out:
                found += [local_steps[key] for key in sorted(local_steps)]
            else:
                found += tier.history.found(tier.directory.steps)
        return sorted(found, key=lambda s: s.step)  # stable: the local one stays last

    def compare_local_steps(self) -> tuple[dict[Key, CommittedStep], set[Key]]:
        """Returns steps of any host's local tier, not abandoned; the keys that all hosts have."""
        if (tier := self._shared_out) is None:
            return {}, set()
        directory = tier.directory
        with self._processes.round("comparing local steps"):
            here = {s.key: s for s in directory.steps()}
            report = directory.abandonment.report(here.values())
            joined = self._processes.combine(report, directory.abandonment.joined)
        # The keys of the steps that all hosts have, and of those that any host has.
        on_all, on_any = directory.abandonment.record(joined)
        # A step that this host lacks gets a path that does not exist, because this host may have
        # another step with the same number.
        elsewhere = {
            (step, at): CommittedStep(step, directory.path / f"{step}-on-another-host", at)
            for step, at in on_any - here.keys()
        }
        return {key: here[key] for key in on_any & here.keys()} | elsewhere, on_all

    def branch(self) -> Branch:
        """Returns the branch of all ``steps``."""
        return self.branch_of(self.steps(), self._lineages_of_hosts())

    def branch_of(
        self,
        steps: Iterable[CommittedStep],
        of_hosts: Mapping[Key, Lineage | None] = types.MappingProxyType({}),
    ) -> Branch:
        """Returns a branch of some steps; ``of_hosts`` are lineages that this host may lack."""

        def lineage_of(step: CommittedStep) -> Lineage | None:
            if step.key in of_hosts:
                return of_hosts[step.key]
            return self.holding(step).directory.lineage(step)

        def left() -> set[Key]:
            return set[Key]().union(*(tier.directory.left() for tier in self))

        def is_damaged(step: CommittedStep) -> bool:
            return self.holding(step).directory.verified.is_damaged(step)

        return Branch(sorted(steps, key=lambda s: s.step), lineage_of, left, is_damaged)

    def _lineages_of_hosts(self) -> dict[Key, Lineage | None]:
        """Returns the lineages of the steps in the local tiers of all hosts."""
        if (tier := self._shared_out) is None:
            return {}

        def joined(reports: Iterable[bytes]) -> bytes:
            found: dict[Key, Any] = {}
            for (step, at), starts in (pair for each in reports for pair in json.loads(each)):
                found[step, at] = found.get((step, at)) or starts  # damaged on one host, perhaps
            return json.dumps([*found.items()]).encode()

        with self._processes.round("comparing local lineages"):
            here = [(step.key, tier.directory.lineage(step)) for step in tier.directory.steps()]
            of_all = json.loads(self._processes.combine(json.dumps(here).encode(), joined))
        return {
            (step, at): None if starts is None else [(name, n) for name, n in starts]
            for (step, at), starts in of_all
        }

    # --- steps in directories that this process can read, found without messages ---

    def numbers(self, name: TierName | None = None) -> list[int]:
        """Returns the numbers of the steps of one tier or all, ascending."""
        return sorted({s.step for tier in self.named(name) for s in tier.directory.steps()})

    def find(self, step: int) -> CommittedStep:
        """Returns a step, preferably local."""
        found: list[CommittedStep] = []
        for tier in reversed(self._tiers):  # the other one need not be readable if this has it
            found += tier.directory.steps()
            if same := [s for s in found if s.step == step]:
                return same[-1]
        # Raises: no tier has it.
        return committed_step.chosen(found, step, [tier.directory.path for tier in self])[-1]
