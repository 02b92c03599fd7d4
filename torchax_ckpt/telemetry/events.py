"""Defines the events of a run, and converts each event to and from a line of JSON.

Lines are untrusted. ``Event.of_line`` returns None for a line that is not a valid event, and leaves
out the invalid values of a valid event; it raises in neither case.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from torchax_ckpt.telemetry.stats import Metric, Stats

_MAX_TEXT = 1000
_MAX_STEPS = 1000
_MAX_RULES = 50
_MAX_NUMBER = 2**63
_MAX_METRICS = 20
_MAX_TIME = 253_402_300_800  # the year 10,000, which dates cannot express


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and 0 <= value < _MAX_NUMBER and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_NUMBER


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT


def _are(is_valid: Callable[[Any], bool], most: int) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, list) and len(v) <= most and all(map(is_valid, v))


def drawable(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of a step that events record: finite numbers, at most 20 of them."""
    are_numbers = {n: v for n, v in metrics.items() if type(v) in (int, float)}
    finite = {n: v for n, v in are_numbers.items() if abs(v) < 1e100 and len(n) <= 100}
    return dict(itertools.islice(finite.items(), _MAX_METRICS))


_NAMES = {
    *("started", "restored", "reached", "saving", "durable", "failed"),
    *("deleted", "set_aside", "mirrored", "mirror_failed", "closed"),
}
_METRICS = Stats.metrics()
# Name of a value -> check of that value. Any event may lack any value.
_VALUES: Mapping[str, Callable[[Any], bool]] = {
    **{m.name: _is_number if m.unit == "seconds" else _is_count for m in _METRICS.values()},
    **dict.fromkeys(("host", "version", "tier", "error"), _is_text),
    "pid": _is_count,
    "is_verified": lambda value: isinstance(value, bool),
    "keeps": _are(lambda rule: isinstance(rule, dict), _MAX_RULES),
    "steps": _are(_is_count, _MAX_STEPS),
    "metrics": lambda value: isinstance(value, dict) and value == drawable(value),
}


@dataclasses.dataclass(frozen=True)
class SaveCost:
    """The times of a save, in seconds since the training thread began the save."""

    step: int
    blocking_secs: float  # until the training thread continued
    durable_secs: float  # until the step was committed


# Names of values in older journals -> their names.
_RENAMED = {"secs": "restore_secs", "num_steps": "interval_steps"}


@dataclasses.dataclass(frozen=True)
class Event:
    """An event in a run, such as a save that began, a commit or a restore.

    Attributes:
      name: ``started`` (the first save took the directory's lease), ``restored``, ``reached`` (the
        current step of training, recorded at most once a minute), ``saving`` (a save began),
        ``durable`` (a save was committed), ``failed`` (a save failed), ``deleted`` (steps were
        deleted), ``set_aside`` (steps of an abandoned branch were renamed), ``mirrored`` (a step
        was copied to the mirror), ``mirror_failed`` (such a copy failed), ``closed`` (the
        checkpointer was closed).
      time_secs: when it happened, in seconds since the epoch.
      step: completed optimizer steps; None if the event concerns no single step.
      values: details of the event: text, lists, and numbers, which are named as the attributes of
        ``Stats`` that are computed from them; of ``durable`` also ``metrics``, the finite numbers
        among those saved with the step. Unknown values are left out.
    """

    name: str
    time_secs: float
    step: int | None = None
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def numbers(self) -> Mapping[str, float]:
        """The event's numbers by the attributes of ``Stats``; a logger can plot them."""
        metrics = (_METRICS[name] for name in self.values if name in _METRICS)
        numbers = {metric.name: self.number(metric) for metric in metrics if metric.kind != "age"}
        return {name: number for name, number in numbers.items() if number is not None}

    def number(self, metric: Metric) -> float | None:
        """Returns what the event adds to a metric, if anything; for "age", when the age began."""
        if metric.event not in ("", self.name):
            return None
        value: Any = 1 if metric.kind == "count" else self.values.get(metric.name)
        if not _is_number(value):
            return None
        return self.time_secs - value if metric.kind == "age" else value

    def to_line(self) -> bytes:
        """Returns the event as one line of JSON."""
        record: dict[str, Any] = {"at": round(self.time_secs, 6), "event": self.name}
        if self.step is not None:
            record["step"] = self.step
        return json.dumps({**record, **self.values}, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> Event | None:
        """Returns a line's event without its invalid values; None if the line is no valid event."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(record, dict):
            return None
        name, step = record.get("event"), record.get("step")
        at: Any = record.get("at")
        if not (_is_text(name) and name in _NAMES and _is_number(at) and at < _MAX_TIME):
            return None
        if step is not None and not _is_count(step):
            return None
        for before, now in _RENAMED.items():
            record.setdefault(now, record.get(before))
        values = {k: record[k] for k, is_valid in _VALUES.items() if is_valid(record.get(k))}
        return cls(name, float(at), step, values)


def bounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an event's values without None; long texts, ``steps`` and ``metrics`` are cut."""
    cut = {}
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, str) and len(value) > _MAX_TEXT:
            value = value[: _MAX_TEXT - 3] + "..."
        elif key == "steps":
            value = [int(step) for step in value][-_MAX_STEPS:]
        elif key == "metrics":
            value = drawable(value)
        cut[key] = value
    return cut
