"""Groups the events of a directory into runs and saves, and computes curves for reports."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from torchax_ckpt.telemetry.events import Event

SaveOutcome = Literal["durable", "failed", "cut off", "in flight"]
_ENDS: Mapping[str, SaveOutcome] = {"durable": "durable", "failed": "failed"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Save:
    """One save, as the recorded events describe it.

    Attributes:
      step: completed optimizer steps.
      began_secs: time of the snapshot, in seconds since the epoch.
      ended_secs: time of the commit or the failure; for a save that was cut off or is in flight,
        time of the last event of its run.
      outcome: how the save ended; ``cut off`` if its program ended during the save.
      blocking_secs, durable_secs, num_bytes, new_bytes: costs of a durable save; None if not known.
      interval_secs: seconds since the previous snapshot of the same run; None for the first one.
      interval_steps: the same interval in steps.
      error: the error of a failed save.
    """

    step: int
    began_secs: float
    ended_secs: float
    outcome: SaveOutcome
    blocking_secs: float | None = None
    durable_secs: float | None = None
    num_bytes: int | None = None
    new_bytes: int | None = None
    interval_secs: float | None = None
    interval_steps: int | None = None
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """The events and saves of one program that wrote to the directory.

    Attributes:
      name: eight hexadecimal digits.
      events: all events of the run, in the order of recording.
      saves: the saves of the run, oldest first.
      ended: True if the run closed its checkpointer; otherwise it was killed or still runs.
      is_running: True if the run holds the directory's lease.
      lost_steps: lower bound of the steps that the next run repeated, because no checkpoint had
        them; None if not known.
    """

    name: str
    events: Sequence[Event]
    saves: Sequence[Save]
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
        return next((e.step for e in reversed(self.events) if e.step is not None), None)

    def named(self, *names: str) -> list[Event]:
        """Returns the run's events whose name is one of ``names``."""
        return [event for event in self.events if event.name in names]


def runs_of(events: Mapping[str, Sequence[Event]], *, is_running: bool) -> list[RecordedRun]:
    """Groups the events of a directory by run; returns the runs in the order in which they began.

    Args:
      events: run -> its events, in the order of recording.
      is_running: True if the newest run still runs, unless it closed its checkpointer.
    """
    in_order = sorted((item for item in events.items() if item[1]), key=lambda i: i[1][0].time_secs)
    runs: list[RecordedRun] = []
    for index, (name, of_run) in enumerate(in_order):
        ended = of_run[-1].name == "closed"
        runs_still = is_running and not ended and index == len(in_order) - 1
        runs.append(
            RecordedRun(
                name=name,
                events=of_run,
                saves=_saves(of_run, "in flight" if runs_still else "cut off"),
                ended=ended,
                is_running=runs_still,
            )
        )
    return [
        dataclasses.replace(run, lost_steps=_lost(run, later))
        for run, later in itertools.zip_longest(runs, runs[1:])
    ]


def _lost(run: RecordedRun, later: RecordedRun | None) -> int | None:
    """Returns a lower bound of the steps of ``run`` that ``later`` trained again; None if unknown.

    ``later`` is the run that followed ``run``; None if there is no such run.
    """
    if later is None or run.last_step is None:
        return None
    # Only events before ``later`` trains count. A restore after that goes back within ``later``.
    start = itertools.takewhile(lambda e: e.name not in ("saving", "reached"), later.events)
    resumed_at = next((e.step for e in reversed([*start]) if e.name == "restored"), None)
    if resumed_at is None or resumed_at > run.last_step:
        return None
    return run.last_step - resumed_at


def _saves(events: Sequence[Event], unended: SaveOutcome) -> list[Save]:
    saves: list[Save] = []
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


def _save(begun: Event, ended: Event, outcome: SaveOutcome) -> Save:
    cost = ended.values if outcome == "durable" else {}
    return Save(
        step=begun.step or 0,
        began_secs=begun.time_secs,
        ended_secs=ended.time_secs,
        outcome=outcome,
        blocking_secs=cost.get("blocking_secs"),
        durable_secs=cost.get("durable_secs"),
        num_bytes=cost.get("num_bytes"),
        new_bytes=cost.get("new_bytes"),
        interval_secs=begun.values.get("interval_secs"),
        interval_steps=begun.values.get("num_steps"),
        error=str(ended.values.get("error", "")) if outcome == "failed" else "",
    )


def steps_over_time(run: RecordedRun) -> list[tuple[float, int]]:
    """Returns the progress of training as points (time in seconds since the epoch, step)."""
    told = run.named("restored", "reached", "saving", "closed")
    return [(event.time_secs, event.step) for event in told if event.step is not None]


# The bytes of a step, divided by the save that wrote them: pairs of a save's number and bytes. The
# last pair is the step's own save.
_Parts = Sequence[tuple[int, int]]


# If a step links files of more saves than this, the rest counts as its own. Only a journal that
# somebody made up says this; its report must not take hours.
_MAX_PARTS = 20


class _Largest:
    """The largest number of a changing collection of numbers; 0 if the collection is empty."""

    def __init__(self) -> None:
        self._counts: collections.Counter[int] = collections.Counter()
        self._heap: list[int] = []  # negative, and with numbers that were removed

    def change(self, number: int, count: int) -> None:
        """Adds a number, or removes it if ``count`` is -1."""
        self._counts[number] += count
        if count > 0:
            heapq.heappush(self._heap, -number)
        while self._heap and not self._counts[-self._heap[0]]:
            del self._counts[-heapq.heappop(self._heap)]

    @property
    def value(self) -> int:
        """The largest number."""
        return -self._heap[0] if self._heap else 0


class _Storage:
    """The bytes that the recorded steps take together; bytes that steps share count once."""

    def __init__(self) -> None:
        self.total_bytes = 0
        # Of each recorded step, also if it was deleted: the run that saved it, and its parts.
        self._recorded: dict[int, tuple[str, _Parts]] = {}
        self._present: dict[int, _Parts] = {}
        self._num_saves = 0
        # For each save, how many of the bytes that it wrote the present steps have. Of the bytes
        # that a save wrote, a later step links what did not change since. The step that has the
        # most bytes therefore has all that any step has.
        self._written: collections.defaultdict[int, _Largest] = collections.defaultdict(_Largest)

    def add(self, event: Event, run: str) -> None:
        """Adds the step of a ``durable`` event of a run; replaces a step of the same number."""
        assert event.step is not None
        self.remove([event.step])
        self._num_saves += 1
        left = event.values.get("num_bytes", 0)
        parts: collections.Counter[int] = collections.Counter()
        for first, linked_bytes in event.values.get("linked", ()) if left else ():
            linked = min(left, linked_bytes)
            by, known = self._recorded.get(first, ("", ()))
            # A run knows which of its own steps wrote the bytes. Of a step of an earlier run it
            # knows only that the step has them; most of them that step has linked itself.
            for save, nbytes in known[::-1] if by == run else known:
                taken = min(linked, nbytes)
                if not taken or (save not in parts and len(parts) == _MAX_PARTS):
                    continue
                parts[save] += taken
                linked -= taken
                left -= taken
        found = (*parts.items(), (self._num_saves, left))
        self._recorded[event.step] = run, found
        self._present[event.step] = found
        for save, nbytes in found:
            self._count(save, nbytes, 1)

    def remove(self, steps: Iterable[int]) -> None:
        """Removes the steps that are present."""
        for step in steps:
            for save, nbytes in self._present.pop(step, ()):
                self._count(save, nbytes, -1)

    def set_aside(self, steps: Iterable[int]) -> None:
        """Keeps the bytes of steps that were renamed, because the bytes still take room."""
        for step in steps:
            self._present.pop(step, None)

    def keep_only(self, steps: Iterable[int]) -> None:
        """Removes the steps that are not among ``steps``."""
        self.remove(self._present.keys() - set(steps))

    def _count(self, save: int, nbytes: int, change: int) -> None:
        largest = self._written[save]
        self.total_bytes -= largest.value
        largest.change(nbytes, change)
        self.total_bytes += largest.value


def bytes_over_time(runs: Sequence[RecordedRun]) -> list[tuple[float, int]]:
    """Returns points (seconds since the epoch, bytes of all steps on storage), one per change.

    This function computes the points from the recorded events, and does not look at the directory.
    Bytes in files that several steps share count once. Abandoned steps that a run renamed (event
    ``set_aside``) still count. A step whose removal was not recorded counts until the next
    ``started`` event, which lists the steps that exist.
    """
    events = sorted(((e, run.name) for run in runs for e in run.events), key=_time_secs)
    storage = _Storage()
    curve: list[tuple[float, int]] = []
    for event, run in events:
        if event.name == "durable" and event.step is not None:
            storage.add(event, run)
        elif event.name == "started" and "steps" in event.values:
            # A killed program did not record its last deletions.
            storage.keep_only(event.values["steps"])
        elif event.name == "deleted":
            storage.remove(event.values.get("steps", ()))
        elif event.name == "set_aside":
            storage.set_aside(event.values.get("steps", ()))
        else:
            continue
        curve.append((event.time_secs, storage.total_bytes))
    return curve


def _time_secs(item: tuple[Event, str]) -> float:
    return item[0].time_secs
