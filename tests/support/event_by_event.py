"""A second, independent simulation of a run, as a reference for the package's simulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torchax_ckpt.planning import Failure, Run, Tier


@dataclasses.dataclass
class EventByEvent:
    """Advances from one event to the next: slow, but simple enough to check by reading.

    The schedule supplies the training time between two snapshots and the number of snapshots
    between two durable saves. The simulation itself finds the times at which they happen.
    """

    run: Run
    has_local: bool
    training_secs: float
    saves_per_durable: int

    def __post_init__(self) -> None:
        self.now = self.lost = self.down = 0.0
        self.num_failures = self.num_local = 0
        self.durable, self.local = 0, -1
        self._restart(0, up_at=0.0)

    def _restart(self, snapshot: int, up_at: float) -> None:
        self.restored = self.position = snapshot
        self.up_at = self.blocked_until = up_at
        self.begins = {snapshot: up_at}
        self.in_flight: dict[str, tuple[float, int]] = {}  # tier -> time of its end, snapshot
        self.due = self.durable + self.saves_per_durable
        self.left = self.training_secs

    def play(self, failures: Sequence[Failure], duration_secs: float) -> None:
        for failure in [*failures, Failure(duration_secs)]:
            while (event := self._next())[0] <= failure.at_secs:
                self._go_to(event[0])
                self._happen(event[1])
            self._go_to(failure.at_secs)
            if failure.at_secs < duration_secs:
                self._fail(failure)

    def _next(self) -> tuple[float, str]:
        events = [(end, tier) for tier, (end, _) in self.in_flight.items()]
        if self.now < self.blocked_until:
            events.append((self.blocked_until, "go on"))
        else:
            events.append((self.now + self.left * self._factor(), "snapshot"))
        return min(events)

    def _factor(self) -> float:
        tiers = {"durable": self.run.durable, "local": self.run.local or self.run.durable}
        return 1 + sum(tiers[name].slowdown for name in self.in_flight)

    def _go_to(self, at: float) -> None:
        if self.now < self.up_at:
            self.down += min(at, self.up_at) - self.now
        elif self.now >= self.blocked_until:
            self.left -= (at - self.now) / self._factor()
        self.now = at

    def _happen(self, event: str) -> None:
        if event == "local":
            _, self.local = self.in_flight.pop(event)
        elif event == "durable":
            _, self.durable = self.in_flight.pop(event)
        elif event == "snapshot":
            self.position += 1
            self.begins[self.position] = self.blocked_until = self.now
            self.left = self.training_secs
            if self.has_local:
                assert self.run.local is not None
                self._save("local", self.run.local)
            if self.position >= self.due:
                self.due = self.position + self.saves_per_durable
                self._save("durable", self.run.durable)

    def _save(self, name: str, tier: Tier) -> None:
        assert name not in self.in_flight, "saves of one tier overlap"
        self.in_flight[name] = (self.now + tier.durable_secs, self.position)
        self.blocked_until += tier.blocking_secs

    def _fail(self, failure: Failure) -> None:
        is_up = self.now >= self.up_at
        if not is_up and not self.run.cluster.restart_can_fail:
            return
        self.num_failures += 1
        if not self.run.cluster.local_survives(failure.kind):
            self.local = -1
        newest = max(self.local, self.durable)
        if is_up:
            self.lost += self.now - self.begins[max(newest, self.restored)]
        self.lost += max(0, self.restored - newest) * self.training_secs
        self.num_local += newest == self.local
        tier = self.run.local if newest == self.local else self.run.durable
        assert tier is not None
        up_at = self.now + self.run.cluster.restart_secs + tier.restore_secs
        self._restart(newest, up_at)
