"""Counts the saves and restores of a checkpointer, and computes quantiles of their costs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection

import numpy as np

from torchax_ckpt.telemetry.events import Event

# Quantiles are computed from the latest values only.
_MAX_VALUES = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantiles:
    """The median and the 90th percentile of the latest 1,000 measured values.

    Attributes:
      p50: the median.
      p90: the value that nine of ten values do not exceed, interpolated between two values.
    """

    p50: float
    p90: float

    @classmethod
    def of(cls, values: Collection[float]) -> Quantiles | None:
        """Returns the quantiles of ``values``, or None if there are no values."""
        if not values:
            return None
        p50, p90 = np.quantile(list(values), (0.5, 0.9)).tolist()
        return cls(p50=p50, p90=p90)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """How many saves and restores a checkpointer made in this process, and what they cost.

    An attribute of type ``Quantiles`` is None until its first value is measured.

    Attributes:
      num_saves: saves that began.
      num_durable: saves that were committed.
      num_failed: saves that failed.
      num_skipped: calls of ``save`` that the policy declined.
      num_restores: steps that were restored.
      blocking_secs: seconds for which a save blocked the training thread; durable saves only.
      durable_secs: seconds from the call of ``save`` to the commit.
      interval_secs: seconds from one snapshot to the next.
      interval_steps: training steps from one snapshot to the next.
      num_bytes: bytes a step takes on storage; only process 0 measures them, after the save.
      new_bytes: those of them that the save wrote; it took the others over from an earlier step,
        as links or, within a bucket, as copies.
      restore_secs: seconds that a restore took.
    """

    num_saves: int
    num_durable: int
    num_failed: int
    num_skipped: int
    num_restores: int
    blocking_secs: Quantiles | None
    durable_secs: Quantiles | None
    interval_secs: Quantiles | None
    interval_steps: Quantiles | None
    num_bytes: Quantiles | None
    new_bytes: Quantiles | None
    restore_secs: Quantiles | None


class Tally:
    """Counts events, and keeps their latest numbers; its callers hold one lock."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        self._values: dict[tuple[str, str], collections.deque[float]] = {}

    def take(self, event: Event) -> None:
        """Counts an event and keeps its numbers."""
        self._counts[event.name] += 1
        for key, value in event.numbers.items():
            self.measured(event.name, key, value)

    def measured(self, name: str, key: str, value: float) -> None:
        """Keeps a number that was measured for an event after it was counted."""
        self._values.setdefault((name, key), collections.deque(maxlen=_MAX_VALUES)).append(value)

    def stats(self, num_skipped: int) -> Stats:
        """Returns the statistics of the events so far."""

        def quantiles(name: str, key: str) -> Quantiles | None:
            return Quantiles.of(self._values.get((name, key), ()))

        return Stats(
            num_saves=self._counts["saving"],
            num_durable=self._counts["durable"],
            num_failed=self._counts["failed"],
            num_skipped=num_skipped,
            num_restores=self._counts["restored"],
            blocking_secs=quantiles("durable", "blocking_secs"),
            durable_secs=quantiles("durable", "durable_secs"),
            interval_secs=quantiles("saving", "interval_secs"),
            interval_steps=quantiles("saving", "num_steps"),
            num_bytes=quantiles("durable", "num_bytes"),
            new_bytes=quantiles("durable", "new_bytes"),
            restore_secs=quantiles("restored", "secs"),
        )
