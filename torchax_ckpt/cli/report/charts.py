"""Owns the drawings of a report, as SVG: what happened when, intervals, storage. Bounded in size.

However long a run was, a drawing has at most about one mark per pixel: marks that would lie on one
another are one. Text goes into elements and is escaped when they are written.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from torchax_ckpt.cli.output import duration, plain, size
from torchax_ckpt.telemetry.timeline import RecordedRun, bytes_over_time, steps_over_time

# Beyond it, the marks of a lane are drawn as one shape, without a word to each.
_MAX_TITLED = 120
_GUTTER, _MARGIN, _LANE, _CURVE = 68, 14, 26, 170
_TIME_STEPS = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200),
    *(86_400 * days for days in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
)


def element(
    tag: str, attributes: Mapping[str, Any] | None = None, *children: Element | str
) -> Element:
    """An element; its text cannot move a terminal's cursor, nor end the element."""
    made = Element(tag, {key: plain(value) for key, value in (attributes or {}).items()})
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + plain(child)
        else:
            made.text = (made.text or "") + plain(child)
    return made


@dataclasses.dataclass(frozen=True)
class Scale:
    """From values to pixels.

    Attributes:
      least, most: the values at both ends.
      begin, end: their pixels.
    """

    least: float
    most: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value, to a tenth."""
        share = (value - self.least) / ((self.most - self.least) or 1)
        return round(self.begin + min(1.0, max(0.0, share)) * (self.end - self.begin), 1)


def timeline(runs: Sequence[RecordedRun], now_secs: float, width: int) -> Element:
    """Steps over time, and below it what happened, one lane for each kind."""
    across = _time_scale(runs, now_secs, width)
    svg = _Drawing(width, f"Timeline: {_spoken(runs)}")
    curves = [steps_over_time(run) for run in runs]
    top_step = max((step for curve in curves for _, step in curve), default=1)
    up = Scale(0, _nice(top_step), _CURVE, _MARGIN)
    svg.grid_across(across, _MARGIN, _CURVE + len(_LANES) * _LANE + 6, narrow=width < 600)
    svg.grid_up(up, width, lambda value: f"{value:,.0f}", "step")
    for curve in curves:
        points = _thinned((across(secs), up(step)) for secs, step in curve)
        if len(points) == 1:
            svg.add("circle", {"cx": points[0][0], "cy": points[0][1], "r": 2, "class": "mark"})
        elif points:
            path = "M" + "L".join(f"{x} {y}" for x, y in points)
            svg.add("path", {"d": path, "class": "line"})
    for index, (label, kind, marks) in enumerate(_LANES):
        middle = _CURVE + 14 + index * _LANE + _LANE / 2
        svg.text(_GUTTER - 8, middle + 4, label, anchor="end")
        svg.add(
            "line", {"x1": _GUTTER, "x2": width - _MARGIN, "y1": middle, "y2": middle, "class": "g"}
        )
        svg.lane(kind, middle, [(across(a), across(b), text) for a, b, text in marks(runs)])
    svg.height = _CURVE + 14 + len(_LANES) * _LANE + 26
    return svg.finished()


def storage(runs: Sequence[RecordedRun], now: tuple[float, int], width: int) -> Element:
    """What the steps take on storage, over time; the last point is measured, not recorded."""
    curve = [*bytes_over_time(runs), now]
    across = _time_scale(runs, now[0], width)
    most = max(nbytes for _, nbytes in curve)
    up = Scale(0, _nice(most), _CURVE, _MARGIN)
    svg = _Drawing(width, f"Storage over time: at most {size(most)}, now {size(now[1])}")
    svg.grid_across(across, _MARGIN, _CURVE, narrow=width < 600)
    svg.grid_up(up, width, lambda value: size(int(value)), "on storage")
    # Of each column the highest, and then the last: no peak is lost.
    columns: dict[float, tuple[float, float]] = {}
    for secs, nbytes in curve:
        x, y = across(secs), up(nbytes)
        columns[round(x)] = (min(columns[round(x)][0], y) if round(x) in columns else y, y)
    path, last = [f"M{across(curve[0][0])} {_CURVE}"], _CURVE + 0.0
    for x, (peak, y) in columns.items():
        path.append(f"L{x} {last}L{x} {peak}L{x} {y}")
        last = y
    svg.add("path", {"d": "".join(path) + f"V{_CURVE}Z", "class": "area"})
    svg.height = _CURVE + 26
    return svg.finished()


def histogram(values: Sequence[float], width: int) -> Element:
    """How far apart snapshots were: bars of equal width, and one for all that is longer."""
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)))]
    has_rest = ordered[-1] > 1.5 * p95
    most = _nice(p95 if has_rest else ordered[-1]) or 1.0
    num_bins = 12 if width < 600 else 24
    counts = [0] * (num_bins + has_rest)
    for value in ordered:
        counts[min(len(counts) - 1, int(value / most * num_bins))] += 1
    up = Scale(0, _nice(max(counts)), _CURVE, _MARGIN)
    median = ordered[len(ordered) // 2]
    svg = _Drawing(
        width, f"Seconds between snapshots: {len(values)} intervals, half below {duration(median)}"
    )
    svg.grid_up(up, width, lambda value: f"{value:,.0f}", "intervals")
    across = Scale(0, len(counts), _GUTTER, width - _MARGIN)
    for index, count in enumerate(counts):
        begin, end = most * index / num_bins, most * (index + 1) / num_bins
        said = f"{duration(begin)} to {duration(end)}" if index < num_bins else f"over {most:g} s"
        x, y = across(index), up(count)
        bar = {
            "x": x + 1,
            "y": y,
            "width": round(across(index + 1) - x - 2, 1),
            "height": round(_CURVE - y, 1),
            "class": "bar" if index < num_bins else "bar rest",
        }
        svg.add("rect", bar, element("title", None, f"{said}: {count}"))
    last = num_bins if not has_rest else num_bins // 2 if width < 600 else num_bins - 1
    for index in range(0, last + 1, num_bins // 4):
        label = duration(most * index / num_bins) if index else "0"
        anchor = "end" if across(index) > across.end - 20 else "middle"
        svg.text(across(index), _CURVE + 18, label, anchor=anchor)
    if has_rest:
        svg.text(across(num_bins + 0.5), _CURVE + 18, f"> {duration(most)}", anchor="end")
    svg.height = _CURVE + 26
    return svg.finished()


class _Drawing:
    """An SVG that grows; every mark is in words too, in a title or the page's tables."""

    def __init__(self, width: int, label: str) -> None:
        self._width = width
        self.height = 0.0
        self._svg = element(
            "svg", {"role": "img", "aria-label": label}, element("title", {}, label)
        )

    def add(self, tag: str, attributes: Mapping[str, Any], *children: Element) -> None:
        self._svg.append(element(tag, attributes, *children))

    def text(self, x: float, y: float, text: str, *, anchor: str = "middle") -> None:
        self._svg.append(element("text", {"x": x, "y": y, "text-anchor": anchor}, text))

    def grid_across(self, across: Scale, top: float, bottom: float, *, narrow: bool) -> None:
        ticks, form = _time_ticks(across.least, across.most, 3 if narrow else 7)
        for secs in ticks:
            x = across(secs)
            self.add("line", {"x1": x, "x2": x, "y1": top, "y2": bottom, "class": "g"})
            label = time.strftime(form, time.gmtime(secs))
            is_last = x > across.end - 20
            self.text(x, bottom + 18, label, anchor="end" if is_last else "middle")

    def grid_up(self, up: Scale, width: int, said: Callable[[float], str], unit: str) -> None:
        for part in range(5):
            value = up.most * part / 4
            if unit != "on storage" and value != int(value):
                continue
            y = up(value)
            self.add("line", {"x1": _GUTTER, "x2": width - _MARGIN, "y1": y, "y2": y, "class": "g"})
            self.text(_GUTTER - 8, y + 4, said(value), anchor="end")

    def lane(self, kind: str, middle: float, marks: Sequence[tuple[float, float, str]]) -> None:
        """Marks of one kind from pixel to pixel; each with words, unless there are too many."""
        if len(marks) <= _MAX_TITLED:
            for begin, end, said in marks:
                shape = _SHAPES[kind](begin, end, middle)
                self.add("path", {"d": shape, "class": kind}, element("title", None, said))
            return
        joined: list[tuple[float, float]] = []
        for begin, end, _ in sorted(marks):
            if joined and begin - joined[-1][1] < 1 and kind in ("saving", "program"):
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            elif not joined or begin - joined[-1][0] >= 1:
                joined.append((begin, end))
        path = "".join(_SHAPES[kind](begin, end, middle) for begin, end in joined)
        said = f"{len(marks):,} of them, too close to tell apart"
        self.add("path", {"d": path, "class": kind}, element("title", None, said))

    def finished(self) -> Element:
        self._svg.set("viewBox", f"0 0 {self._width} {self.height:g}")
        self._svg.set("class", "narrow" if self._width < 600 else "wide")
        return self._svg


def _bar(begin: float, end: float, middle: float) -> str:
    return f"M{begin} {middle - 6}H{max(end, begin + 1.5):g}V{middle + 6}H{begin}Z"


def _tick(begin: float, end: float, middle: float) -> str:
    return f"M{begin - 0.8:g} {middle - 8}h1.6v16h-1.6Z"


def _cross(begin: float, end: float, middle: float) -> str:
    x, y = begin, middle
    return f"M{x - 5:g} {y - 5}L{x + 5:g} {y + 5}M{x - 5:g} {y + 5}L{x + 5:g} {y - 5}"


def _triangle(begin: float, end: float, middle: float) -> str:
    return f"M{begin:g} {middle - 6}l6 12h-12Z"


_SHAPES: Mapping[str, Callable[[float, float, float], str]] = {
    "program": _bar,
    "saving": _bar,
    "durable": _tick,
    "deleted": _tick,
    "restored": _triangle,
    "failed": _cross,
    "cut": _cross,
}

_Marks = Iterable[tuple[float, float, str]]


def _programs(runs: Sequence[RecordedRun]) -> _Marks:
    for run in runs:
        end = "closed" if run.ended else "runs" if run.is_running else "ended without close"
        yield run.began_secs, run.ended_secs, f"program {run.name} on {run.host}: {end}"


def _saving(runs: Sequence[RecordedRun]) -> _Marks:
    for save in (save for run in runs for save in run.saves):
        took = duration(save.ended_secs - save.began_secs)
        yield save.began_secs, save.ended_secs, f"step {save.step}: {save.outcome}, {took}"


def _durable(runs: Sequence[RecordedRun]) -> _Marks:
    for save in (save for run in runs for save in run.saves if save.outcome == "durable"):
        yield save.ended_secs, save.ended_secs, f"step {save.step} is durable"


def _failed(runs: Sequence[RecordedRun]) -> _Marks:
    for save in (save for run in runs for save in run.saves):
        if save.outcome in ("failed", "cut off"):
            yield save.ended_secs, save.ended_secs, f"step {save.step}: {save.error or 'cut off'}"


def _named(*names: str) -> Callable[[Sequence[RecordedRun]], _Marks]:
    def marks(runs: Sequence[RecordedRun]) -> _Marks:
        for event in (event for run in runs for event in run.named(*names)):
            steps = event.values.get("steps") or [event.step]
            said = f"{event.name.replace('_', ' ')}: step {', '.join(map(str, steps[:20]))}"
            yield event.time_secs, event.time_secs, said

    return marks


_LANES: Sequence[tuple[str, str, Callable[[Sequence[RecordedRun]], _Marks]]] = (
    ("program", "program", _programs),
    ("saving", "saving", _saving),
    ("durable", "durable", _durable),
    ("deleted", "deleted", _named("deleted", "set_aside")),
    ("restored", "restored", _named("restored")),
    ("failed", "failed", _failed),
)


def _spoken(runs: Sequence[RecordedRun]) -> str:
    saves = [save for run in runs for save in run.saves]
    durable = sum(save.outcome == "durable" for save in saves)
    failed = sum(save.outcome in ("failed", "cut off") for save in saves)
    return (
        f"{len(runs)} programs, {len(saves)} saves, {durable} durable, {failed} failed or cut off"
    )


def _time_scale(runs: Sequence[RecordedRun], now_secs: float, width: int) -> Scale:
    begin = min(run.began_secs for run in runs)
    end = max(run.ended_secs for run in runs)
    if any(run.is_running for run in runs):
        end = max(end, now_secs)
    return Scale(begin, max(end, begin + 1), _GUTTER, width - _MARGIN)


def _time_ticks(begin: float, end: float, most: int) -> tuple[list[float], str]:
    """Where to write times, and how: full hours, not every 97 minutes."""
    apart = next((s for s in _TIME_STEPS if (end - begin) / s <= most), (end - begin) / most)
    first = math.ceil(begin / apart) * apart
    ticks = [first + i * apart for i in range(int((end - first) // apart) + 1)]
    form = "%H:%M:%S" if apart < 60 else "%H:%M"
    if end - begin > 86_400:
        form = "%b %d" if apart >= 86_400 else "%b %d %H:%M"
    return ticks, form


def _nice(most: float) -> float:
    """The next number that divides well into four."""
    if most < 1e-9:  # no time or size is: odd events alone say so, and floats end near there
        return 1.0
    power = 10 ** math.floor(math.log10(most))
    nice = next(n for n in (1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10) if most <= n * power * 1.0001)
    return max(nice * power, 4.0) if most >= 1 and nice * power < 4 and most <= 4 else nice * power


def _thinned(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of each pixel's column the first point and the last."""
    kept: list[tuple[float, float]] = []
    for x, y in points:
        if len(kept) > 1 and round(kept[-1][0]) == round(x) == round(kept[-2][0]):
            kept[-1] = x, y
        elif not kept or kept[-1] != (x, y):
            kept.append((x, y))
    return kept
