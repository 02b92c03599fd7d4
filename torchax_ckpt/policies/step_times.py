"""Measures how much a save in flight slows training steps, from the completion times of the steps.

A stretch is a sequence of consecutive steps that all had a save in flight, or that all had none.
The time per step is averaged over a stretch, because a program that runs ahead of its devices
completes many steps in quick succession. The slowdown is computed from the median over several
stretches, because a stretch may contain a pause to evaluate or compile. A step in which a save
begins belongs to no stretch, because the save blocks the training thread during this step.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics

_OBSERVED = 5


@dataclasses.dataclass
class _Stretch:
    kind: tuple[bool, int | None]
    first: tuple[float, int]
    last: tuple[float, int]

    @property
    def secs_per_step(self) -> float | None:
        """Average seconds per step of the stretch; None until it contains a whole step."""
        num_steps = self.last[1] - self.first[1]
        return (self.last[0] - self.first[0]) / num_steps if num_steps > 0 else None


class StepTimes:
    """The average step times of a run, measured separately with and without a save in flight."""

    def __init__(self) -> None:
        self._stretch: _Stretch | None = None
        self._saving: collections.deque[float] = collections.deque(maxlen=_OBSERVED)
        self._quiet: collections.deque[float] = collections.deque(maxlen=_OBSERVED)
        self.last_secs = 0.0
        """Seconds that the latest step took."""
        self.num_unmatched = 0
        """Number of stretches with a save in flight since the latest stretch without one."""

    def completed(
        self, step: int, now_secs: float, *, is_saving: bool, newest_step: int | None
    ) -> None:
        """Records a completed step.

        Args:
          step: the number of the step; a number not above the previous one ends the stretch.
          now_secs: the present time, on any clock.
          is_saving: whether a save is in flight.
          newest_step: the newest step that is saved or in flight; a new value ends the stretch.
        """
        kind, at, stretch = (is_saving, newest_step), (now_secs, step), self._stretch
        if stretch is not None and step == stretch.last[1] and kind == stretch.kind:
            return  # a repeated call for the same step
        if stretch is not None and step > stretch.last[1]:
            self.last_secs = (now_secs - stretch.last[0]) / (step - stretch.last[1])
            if kind == stretch.kind:
                stretch.last = at
                return
        self._end()
        self._stretch = _Stretch(kind, at, at)

    def _end(self) -> None:
        secs = self._stretch.secs_per_step if self._stretch is not None else None
        if self._stretch is None or secs is None or secs <= 0:
            return
        if self._stretch.kind[0]:
            self._saving.append(secs)
            self.num_unmatched += 1
        else:
            self._quiet.append(secs)
            self.num_unmatched = 0

    @property
    def has_quiet(self) -> bool:
        """Whether the time of steps without a save in flight was measured at least once."""
        return bool(self._quiet)

    @property
    def slowdown(self) -> float:
        """The fraction by which a save in flight lengthens steps; 0 until both kinds are timed."""
        if not self._saving or not self._quiet:
            return 0.0
        return max(0.0, statistics.median(self._saving) / statistics.median(self._quiet) - 1)
