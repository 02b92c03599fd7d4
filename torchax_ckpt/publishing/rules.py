"""Rules that say which step of a run is to be published next, if any."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from torchax_ckpt import policies
from torchax_ckpt.storage.directory.committed_step import CommittedStep

# Returns a step with its metrics, which are read from storage.
Info: TypeAlias = Callable[[CommittedStep], "policies.CheckpointInfo"]


class Ranked(Protocol):
    """What rules know of a published folder: its step, and the metrics of the step."""

    @property
    def step(self) -> int:
        """Completed optimizer steps."""

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics that were saved with the step."""


@dataclasses.dataclass(frozen=True)
class Every:
    """Publishes the newest step, once it is ``num_steps`` or more past the last published one.

    While nothing is published, the steps count from 0. Steps between the last published one and the
    newest are not published.

    Attributes:
      num_steps: the least number of steps between two published ones.
    """

    num_steps: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.num_steps, bool) or not isinstance(self.num_steps, int):
            raise TypeError(f"every: expected a number of steps, found {self.num_steps!r:.80}")
        if self.num_steps < 1:
            raise ValueError(f"every: expected at least one step, found {self.num_steps}")

    def due(
        self, steps: Sequence[CommittedStep], published: Sequence[Ranked], info: Info
    ) -> CommittedStep | None:
        """Returns the step to publish; None if no step is due.

        Args:
          steps: the steps of the run, oldest first.
          published: the published steps of the same branch of the run.
          info: returns a step with its metrics.
        """
        last = max((folder.step for folder in published), default=0)
        return steps[-1] if steps and steps[-1].step >= last + self.num_steps else None

    def at_end(self) -> Every:
        """Returns the rule for the end of a run, which publishes the newest step in any case."""
        return Every(1)


@dataclasses.dataclass(frozen=True)
class Best:
    """Publishes the best step by a metric, if it is better than each published one.

    A step without the metric, or with NaN as its value, is never published.

    Attributes:
      metric: the name of the metric, as in ``save(step, metrics={"loss": loss})``.
      mode: whether small ("min") or large ("max") values are good.
    """

    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise TypeError(f"best: expected the name of a metric, found {self.metric!r:.80}")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode: expected 'min' or 'max', found {self.mode!r:.80}")

    def due(
        self, steps: Sequence[CommittedStep], published: Sequence[Ranked], info: Info
    ) -> CommittedStep | None:
        """Returns the step to publish; None if no step is due. The arguments are as for Every."""
        rule = policies.BestN(metric=self.metric, mode=self.mode)
        ranked = rule.ranked([info(committed) for committed in steps])
        if not ranked:
            return None
        best = ranked[0]
        if known := rule.ranked(published):
            new, old = (each.metrics[self.metric] for each in (best, known[0]))
            if not (new < old if self.mode == "min" else new > old):
                return None
        return next(committed for committed in steps if committed.step == best.step)

    def at_end(self) -> Best:
        """Returns the rule for the end of a run, which is this one."""
        return self


Rule: TypeAlias = Every | Best
