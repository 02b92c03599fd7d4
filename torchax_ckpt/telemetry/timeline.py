"""Groups the events of a directory into runs and saves, and returns curves for reports."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

from torchax_ckpt.telemetry.events import Event
from torchax_ckpt.telemetry.stats import Stats

SaveOutcome = Literal["durable", "failed", "cut off", "in flight"]
_ENDS: Mapping[str, SaveOutcome] = {"durable": "durable", "failed": "failed"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveSpan:
    """One save, as the recorded events describe it; times are in seconds since the epoch.

    A save that was cut off (its program ended) or is in flight ends with the last event of its run.
    """

    step: int
    began_secs: float
    ended_secs: float
    outcome: SaveOutcome
    error: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """The events and saves of one program that wrote to the directory, in their order.

    ``ended`` is False if it was killed or is running; ``is_running`` is True if it holds the lease.
    ``lost_steps`` is a lower bound of the steps that the next run repeated, or None.
    """

    name: str
    events: Sequence[Event]
    saves: Sequence[SaveSpan]
    ended: bool
    is_running: bool
    lost_steps: int | None = None

    @property
    def began_secs(self) -> float:
        """Time of the run's first event, in seconds since the epoch."""
        return self.events[0].time_secs

    @property
    def ended_secs(self) -> float:
        """Time of the run's last event, in seconds since the epoch."""
        return max(self.began_secs, self.events[-1].time_secs)

    @property
    def host(self) -> str:
        """Name of the host on which the run ran; "" if the host is not recorded."""
        return next((str(e.values["host"]) for e in self.events if "host" in e.values), "")

    @property
    def first_step(self) -> int | None:
        """The first step number in the run's events; None if no event has a step number."""
        return next((e.step for e in self.events if e.step is not None), None)

    @property
    def last_step(self) -> int | None:
        """The last step number in the run's events; None if no event has a step number."""
        return _last_step(self.events)

    def named(self, *names: str) -> list[Event]:
        """Returns the run's events whose name is one of ``names``."""
        return [event for event in self.events if event.name in names]


def runs_of(events: Mapping[str, Sequence[Event]], *, is_running: bool) -> list[RecordedRun]:
    """Groups events by run; if ``is_running``, the newest run is running, unless it was closed."""
    in_order = sorted((item for item in events.items() if item[1]), key=lambda i: i[1][0].time_secs)
    runs: list[RecordedRun] = []
    later: Sequence[Event] = ()
    for name, of_run in reversed(in_order):
        ended = of_run[-1].name == "closed"
        is_live = is_running and not ended and not runs
        runs.append(
            RecordedRun(
                name=name,
                events=of_run,
                saves=_saves(of_run, "in flight" if is_live else "cut off"),
                ended=ended,
                is_running=is_live,
                lost_steps=_lost(of_run, later),
            )
        )
        later = of_run
    return runs[::-1]


def _last_step(events: Sequence[Event]) -> int | None:
    return next((event.step for event in reversed(events) if event.step is not None), None)


def _lost(events: Sequence[Event], later: Sequence[Event]) -> int | None:
    """Returns a lower bound of the steps of a run that the next run, ``later``, trained again."""
    last_step = _last_step(events)
    # Only events before ``later`` trains count. A restore after that goes back within ``later``.
    start = itertools.takewhile(lambda e: e.name not in ("saving", "reached"), later)
    resumed_at = next((e.step for e in reversed([*start]) if e.name == "restored"), None)
    if last_step is None or resumed_at is None or resumed_at > last_step:
        return None
    return last_step - resumed_at


def _saves(events: Sequence[Event], unended: SaveOutcome) -> list[SaveSpan]:
    saves: list[SaveSpan] = []
    begun: Event | None = None
    for event in events:
        if event.name == "saving":
            begun = event  # the previous save has ended, but its end was not recorded
        elif begun is not None and event.step == begun.step and event.name in _ENDS:
            saves.append(_save(begun, event, _ENDS[event.name]))
            begun = None
    if begun is not None:
        saves.append(_save(begun, events[-1], unended))
    return saves


def _save(begun: Event, ended: Event, outcome: SaveOutcome) -> SaveSpan:
    return SaveSpan(
        step=begun.step or 0,
        began_secs=begun.time_secs,
        ended_secs=ended.time_secs,
        outcome=outcome,
        error=str(ended.values.get("error", "")) if outcome == "failed" else "",
    )


def steps_over_time(run: RecordedRun) -> list[tuple[float, int]]:
    """Returns the progress of training as points (seconds since the epoch, step)."""
    with_steps = run.named("restored", "reached", "saving", "closed")
    return [(event.time_secs, event.step) for event in with_steps if event.step is not None]


def numbers_of(runs: Sequence[RecordedRun]) -> dict[str, list[float]]:
    """Returns attribute of ``Stats`` -> numbers of the events, for attributes with quantiles."""
    metrics = Stats.metrics().values()
    numbers: dict[str, list[float]] = {m.name: [] for m in metrics if m.kind == "quantiles"}
    for event in (event for run in runs for event in run.events):
        for name, number in event.numbers.items():
            numbers.get(name, []).append(number)
    return numbers


def bytes_over_time(runs: Sequence[RecordedRun]) -> list[tuple[float, int]]:
    """Returns points (seconds since the epoch, bytes of all steps of the run), as recorded."""
    events = (event for run in runs for event in run.events)
    return sorted(
        (event.time_secs, int(event.values["total_bytes"]))
        for event in events
        if "total_bytes" in event.values
    )


def metrics_over_steps(runs: Sequence[RecordedRun]) -> dict[str, list[tuple[int, float]]]:
    """Returns metric -> points (step, value) of the durable saves that led to the newest one.

    Saves behind which the training went back are left out: their steps were trained again. A
    restore alone leaves none out: after it, the program may only have evaluated or exported.
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    back_to = 0
    for event in (event for run in runs for event in run.named("restored", "durable")):
        if event.step is None:
            continue
        if event.name == "durable":
            last_step = min(back_to, event.step - 1)
            for curve in curves.values():
                while curve and curve[-1][0] > last_step:
                    curve.pop()
            for name, value in event.values.get("metrics", {}).items():
                curves.setdefault(name, []).append((event.step, value))
        back_to = event.step
    return {name: curve for name, curve in curves.items() if curve}


def busy_spans(runs: Sequence[RecordedRun], now_secs: float) -> list[tuple[float, float]]:
    """Returns when programs ran, as spans (begin, end) in seconds since the epoch, in order.

    A program that was killed may have run longer: its span ends with its last event.
    Two spans are one if the time between them is below a twentieth of all the time of programs.
    """
    spans = sorted(
        (run.began_secs, max(run.began_secs + 1, now_secs if run.is_running else run.ended_secs))
        for run in runs
    )
    least_secs = sum(end - begin for begin, end in spans) / 20
    busy = spans[:1]
    for begin, end in spans[1:]:
        if begin - busy[-1][1] > least_secs:
            busy.append((begin, end))
        else:
            busy[-1] = (busy[-1][0], max(busy[-1][1], end))
    return busy
