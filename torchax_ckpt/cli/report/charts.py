"""Draws the charts of a report: the timeline, the storage that steps take, the save intervals.

A chart is a list of SVG paths and labels, which the page's template writes and escapes. The size
of a chart is bounded, however long a run was: in a lane with more than 120 marks, marks that are
less than a pixel apart become one mark, and a curve has at most three points per pixel of width.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from torchax_ckpt.cli.output import duration, size
from torchax_ckpt.telemetry.timeline import RecordedRun, steps_over_time

# A lane with more marks than this is drawn as one shape, with one title for all marks.
_MAX_TITLED = 120
# In pixels: the margins left and right of the plot, the height of a lane, the plot's bottom edge.
_LEFT, _MARGIN, _LANE, _BOTTOM = 68, 14, 26, 170
_TIME_STEPS = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200),
    *(86_400 * days for days in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
)

_Marks = list[tuple[float, float, str]]  # begin, end, title


@dataclasses.dataclass
class Chart:
    """An SVG image.

    Attributes:
      width, height: in pixels.
      label: the chart in words, for readers who do not see it.
      shapes: the class, the path and the title of each shape, in the order they are painted.
      texts: x, y, ``text-anchor`` and text of each label.
    """

    width: int
    height: float
    label: str
    shapes: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    texts: list[tuple[float, float, str, str]] = dataclasses.field(default_factory=list)

    @property
    def is_narrow(self) -> bool:
        """True if the chart is for narrow screens."""
        return self.width < 600

    def scale(self, least: float, most: float) -> Scale:
        """Returns the plot's horizontal scale, from ``least`` to ``most``."""
        return Scale(least, most, _LEFT, self.width - _MARGIN)

    def add_times(self, across: Scale, bottom: float) -> None:
        """Adds vertical grid lines, and below each line its time, to the chart."""
        ticks, form = _time_ticks(across.least, across.most, 3 if self.is_narrow else 7)
        for secs in ticks:
            x = across(secs)
            self.shapes.append(("g", f"M{x} {_MARGIN}V{bottom}", ""))
            anchor = "end" if x > across.end - 20 else "middle"
            self.texts.append((x, bottom + 18, anchor, time.strftime(form, time.gmtime(secs))))

    def add_values(self, most: float, name: Callable[[float], str], *, whole: bool = True) -> Scale:
        """Adds horizontal grid lines with values to the chart; returns the vertical scale.

        Args:
          most: the largest value to draw.
          name: returns a value's label.
          whole: True if the values are counts. Fractions then get no line.
        """
        up = Scale(0, _nice(most), _BOTTOM, _MARGIN)
        for value in (up.most * part / 4 for part in range(5)):
            if not whole or value == int(value):
                self.shapes.append(("g", f"M{_LEFT} {up(value)}H{self.width - _MARGIN}", ""))
                self.texts.append((_LEFT - 8, up(value) + 4, "end", name(value)))
        return up


@dataclasses.dataclass(frozen=True)
class Scale:
    """Converts values to pixels.

    Attributes:
      least, most: the smallest and the largest value.
      begin, end: the pixels of ``least`` and ``most``.
    """

    least: float
    most: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        """Returns the position of a value in pixels, rounded to a tenth of a pixel."""
        share = (value - self.least) / ((self.most - self.least) or 1)
        return round(self.begin + min(1.0, max(0.0, share)) * (self.end - self.begin), 1)


def timeline(runs: Sequence[RecordedRun], now_secs: float, width: int) -> Chart:
    """Draws the training step over time and, below this curve, a lane for each kind of event."""
    lanes = _lanes(runs)
    num_failed, num_durable = len(lanes["failed"]), len(lanes["durable"])
    chart = Chart(
        width,
        _BOTTOM + 40 + len(lanes) * _LANE,
        f"Timeline: {len(runs)} programs, {len(lanes['saving'])} saves, {num_durable} durable, "
        f"{num_failed} failed or cut off",
    )
    across = _time_scale(chart, runs, now_secs)
    curves = [steps_over_time(run) for run in runs]
    chart.add_times(across, _BOTTOM + len(lanes) * _LANE + 6)
    up = chart.add_values(max((step for c in curves for _, step in c), default=1), _count)
    for curve in curves:
        points = _by_column((across(secs), up(step)) for secs, step in curve)
        if len(points) == 1:
            x, y = points[0]
            chart.shapes.append(("mark", f"M{x - 2:g} {y}a2 2 0 1 0 4 0a2 2 0 1 0-4 0Z", ""))
        elif points:
            chart.shapes.append(("line", "M" + "L".join(f"{x} {y}" for x, y in points), ""))
    for index, (name, marks) in enumerate(lanes.items()):
        y = _BOTTOM + 14 + (index + 0.5) * _LANE
        chart.texts.append((_LEFT - 8, y + 4, "end", name))
        chart.shapes.append(("g", f"M{_LEFT} {y}H{width - _MARGIN}", ""))
        placed = [(across(begin), across(end), title) for begin, end, title in marks]
        if len(placed) > _MAX_TITLED:
            placed = _merged(placed, joins=_SHAPES[name] is _bar)
            path = "".join(_SHAPES[name](begin, end, y) for begin, end, _ in placed)
            title = f"{len(marks):,} of them, too close to tell apart"
            chart.shapes.append((name, path, title))
        else:
            chart.shapes += [(name, _SHAPES[name](a, b, y), title) for a, b, title in placed]
    return chart


def storage(
    runs: Sequence[RecordedRun], curve: Sequence[tuple[float, int]], now_secs: float, width: int
) -> Chart:
    """Draws a curve of the bytes that all steps take on storage over time.

    Args:
      runs: the recorded programs.
      curve: points (seconds since the epoch, bytes); the last one is that of ``now_secs``.
      now_secs: the present time, in seconds since the epoch.
      width: in pixels.
    """
    most = max(nbytes for _, nbytes in curve)
    label = f"Storage over time: at most {size(most)}, now {size(curve[-1][1])}"
    chart = Chart(width, _BOTTOM + 26, label)
    across = _time_scale(chart, runs, now_secs)
    chart.add_times(across, _BOTTOM)
    up = chart.add_values(most, lambda value: size(int(value)), whole=False)
    points = _by_column((across(secs), up(nbytes)) for secs, nbytes in curve)
    path = "".join(f"H{x}V{y}" for x, y in points)
    chart.shapes.append(("area", f"M{points[0][0]} {_BOTTOM}{path}V{_BOTTOM}Z", ""))
    return chart


def histogram(values: Sequence[float], width: int) -> Chart:
    """Draws a histogram of ``values``, the intervals between snapshots in seconds.

    The bars have equal widths. If the longest interval exceeds 1.5 times the 95th percentile, one
    extra bar at the right counts all intervals beyond the scale of the other bars.
    """
    ordered = sorted(values)
    median = duration(ordered[len(ordered) // 2])
    label = f"Seconds between snapshots: {len(values)} intervals, half below {median}"
    chart = Chart(width, _BOTTOM + 26, label)
    p95 = ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)))]
    has_rest = ordered[-1] > 1.5 * p95
    most = _nice(p95 if has_rest else ordered[-1])
    num_bins = 12 if chart.is_narrow else 24
    counts = [0] * (num_bins + has_rest)
    for value in ordered:
        counts[min(len(counts) - 1, int(value / most * num_bins))] += 1
    up, across = chart.add_values(max(counts), _count), chart.scale(0, len(counts))
    edges = [duration(most * index / num_bins) for index in range(num_bins + 1)]
    for index, count in enumerate(counts):
        is_rest = index == num_bins
        title = f"over {most:g} s" if is_rest else f"{edges[index]} to {edges[index + 1]}"
        left, right = across(index) + 1, across(index + 1) - 1
        path = f"M{left:g} {_BOTTOM}V{up(count)}H{right:g}V{_BOTTOM}Z"
        chart.shapes.append(("rest" if is_rest else "bar", path, f"{title}: {count}"))
    # The label of the last bar takes the room of the label before it.
    last = num_bins if not has_rest else num_bins // 2 if chart.is_narrow else num_bins - 1
    for index in range(0, last + 1, num_bins // 4):
        anchor = "end" if across(index) > across.end - 20 else "middle"
        chart.texts.append((across(index), _BOTTOM + 18, anchor, edges[index] if index else "0"))
    if has_rest:
        chart.texts.append((across(num_bins + 0.5), _BOTTOM + 18, "end", f"> {edges[-1]}"))
    return chart


def _bar(begin: float, end: float, y: float) -> str:
    return f"M{begin} {y - 6}H{max(end, begin + 1.5):g}V{y + 6}H{begin}Z"


def _tick(x: float, _: float, y: float) -> str:
    return f"M{x - 0.8:g} {y - 8}h1.6v16h-1.6Z"


def _cross(x: float, _: float, y: float) -> str:
    return f"M{x - 5:g} {y - 5:g}l10 10m-10 0l10-10"


def _triangle(x: float, _: float, y: float) -> str:
    return f"M{x:g} {y - 6:g}l6 12h-12Z"


# The lanes from top to bottom. A lane's name is also the class of its marks.
_SHAPES: Mapping[str, Callable[[float, float, float], str]] = {
    "program": _bar,
    "saving": _bar,
    "durable": _tick,
    "deleted": _tick,
    "restored": _triangle,
    "failed": _cross,
}


def _lanes(runs: Sequence[RecordedRun]) -> dict[str, _Marks]:
    """Returns the marks of each lane as (begin, end, title), in seconds since the epoch."""
    lanes: dict[str, _Marks] = {name: [] for name in _SHAPES}
    for run in runs:
        end = "closed" if run.ended else "runs" if run.is_running else "ended without close"
        title = f"program {run.name} on {run.host}: {end}"
        lanes["program"].append((run.began_secs, run.ended_secs, title))
        for save in run.saves:
            begin, end_secs = save.began_secs, save.ended_secs
            title = f"step {save.step}: {save.outcome}, {duration(end_secs - begin)}"
            lanes["saving"].append((begin, end_secs, title))
            if save.outcome == "durable":
                lanes["durable"].append((end_secs, end_secs, f"step {save.step} is durable"))
            elif save.outcome in ("failed", "cut off"):
                title = f"step {save.step}: {save.error or 'cut off'}"
                lanes["failed"].append((end_secs, end_secs, title))
        for event in run.named("deleted", "set_aside", "restored"):
            steps = event.values.get("steps") or [event.step]
            title = f"{event.name.replace('_', ' ')}: step {', '.join(map(str, steps[:20]))}"
            lane = "restored" if event.name == "restored" else "deleted"
            lanes[lane].append((event.time_secs, event.time_secs, title))
    return lanes


def _merged(marks: _Marks, *, joins: bool) -> _Marks:
    """Merges marks that are less than a pixel apart; returns the remaining marks.

    Args:
      marks: begin and end in pixels, and a title that is not used.
      joins: True for bars: a bar is extended by the next bar if less than a pixel separates them.
        False for other marks: a mark that begins less than a pixel after the last one is left out.
    """
    merged: _Marks = []
    for begin, end, _ in sorted(marks):
        if joins and merged and begin - merged[-1][1] < 1:
            merged[-1] = merged[-1][0], max(end, merged[-1][1]), ""
        elif not merged or begin - merged[-1][0] >= 1:
            merged.append((begin, end, ""))
    return merged


def _time_scale(chart: Chart, runs: Sequence[RecordedRun], now_secs: float) -> Scale:
    begin = min(run.began_secs for run in runs)
    end = max(run.ended_secs for run in runs)
    if any(run.is_running for run in runs):
        end = max(end, now_secs)
    return chart.scale(begin, max(end, begin + 1))


def _time_ticks(begin: float, end: float, most: int) -> tuple[list[float], str]:
    """Returns the times of at most ``most`` + 1 grid lines, and the labels' ``strftime`` format."""
    apart = next((s for s in _TIME_STEPS if (end - begin) / s <= most), (end - begin) / most)
    first = math.ceil(begin / apart) * apart
    ticks = [first + i * apart for i in range(int((end - first) // apart) + 1)]
    form = "%H:%M:%S" if apart < 60 else "%H:%M"
    if end - begin > 86_400:
        form = "%b %d" if apart >= 86_400 else "%b %d %H:%M"
    return ticks, form


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _nice(most: float) -> float:
    """Returns a round number, at least ``most``, to end a scale that is divided into quarters."""
    if most < 1e-9:  # Only a damaged journal has times this small; floats underflow near them.
        return 1.0
    power = 10 ** math.floor(math.log10(most))
    nice = next(n for n in (1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10) if most <= n * power * 1.0001)
    return max(nice * power, 4.0) if most >= 1 and nice * power < 4 and most <= 4 else nice * power


def _by_column(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the first, highest and last point of a curve in each column of pixels."""
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(round(point[0]), []).append(point)
    kept: list[tuple[float, float]] = []
    for column in columns.values():
        # The highest point has the smallest y.
        for point in (column[0], min(column, key=lambda p: p[1]), column[-1]):
            if not kept or kept[-1] != point:
                kept.append(point)
    return kept
