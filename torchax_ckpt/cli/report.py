"""The command ``report``: writes one HTML file about a run, with charts, and without scripts.

The values come from a directory that other people may have written to. Jinja2 escapes each in
``report.html.jinja``; a Content-Security-Policy makes browsers block scripts and requests besides.

A chart is SVG paths and labels, which the template escapes and the browser scales. Its size is
bounded however long a run was: a lane with many marks is one path, and what is drawn at one place
is drawn once.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import jinja2
import typer
from etils import epath

from torchax_ckpt.cli import output
from torchax_ckpt.cli.exit_codes import OK, UsageError
from torchax_ckpt.cli.output import duration, number, plain, size
from torchax_ckpt.cli.show import steps_of, writer_of
from torchax_ckpt.cli.step_arguments import Directory, Json, existing, output_path
from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.runtime.user_messages import counted
from torchax_ckpt.storage.medium import fsync, permissions
from torchax_ckpt.telemetry.events import drawable
from torchax_ckpt.telemetry.journal import read_events
from torchax_ckpt.telemetry.stats import Quantiles, Stats
from torchax_ckpt.telemetry.timeline import (
    RecordedRun,
    SaveSpan,
    busy_spans,
    bytes_over_time,
    metrics_over_steps,
    numbers_of,
    runs_of,
    steps_over_time,
)


def report(
    directory: Directory,
    place: Annotated[
        str, typer.Argument(metavar="OUT", help="The page to write; replaces an older report.")
    ] = "report.html",
    as_json: Json = False,
) -> int:
    """Writes one HTML page about a run: its events over time, save intervals, storage, steps.

    Reads the events that the run's programs have recorded in the directory; a program may still be
    running. The page contains no script and loads nothing from the network.
    """
    out = output_path(place)
    _require_ours(out)
    run = existing(directory)
    now_secs = time.time()
    steps, num_bytes = steps_of(run)
    writer = writer_of(run)
    runs = runs_of(read_events(run.path), is_running=writer is not None and writer[1])
    permissions.make_folder(epath.Path(out.parent))
    with fsync.swapped_in(out) as partial:  # no browser loads half a page
        content = page(str(run.path), now_secs, runs, steps, num_bytes)
        partial.write_text(content, encoding="utf-8", errors="replace")
    if as_json:
        output.print_json(
            {"directory": str(run.path), "page": str(out), "runs": [_as_json(r) for r in runs]}
        )
    else:
        saves = sum(len(r.saves) for r in runs)
        numbers = ((len(runs), "program"), (saves, "save"), (len(steps), "step"))
        output.print_line(f"{out}: {', '.join(counted(*number) for number in numbers)}")
    return OK


def _as_json(run: RecordedRun) -> dict[str, Any]:
    outcomes = [save.outcome for save in run.saves]
    quantiles = {name: Quantiles.of(numbers) for name, numbers in numbers_of([run]).items()}
    return {
        "began": output.moment(int(run.began_secs * 1e9)),
        "last_event": output.moment(int(run.ended_secs * 1e9)),
        "host": run.host,
        "closed": run.ended,
        "running": run.is_running,
        "first_step": run.first_step,
        "last_step": run.last_step,
        "steps_done_again": run.lost_steps,
        "num_durable": outcomes.count("durable"),
        "num_failed": outcomes.count("failed"),
        "num_cut_off": outcomes.count("cut off"),
        **{n: None if value is None else vars(value) for n, value in quantiles.items()},
    }


def _require_ours(out: Path) -> None:
    """Raises if ``out`` is a directory, or a file that is not an earlier report."""
    if out.is_dir():
        raise UsageError(f"report: {out}: expected the name of a file, found a directory")
    if out.exists():
        with open(out, "rb") as file:
            if MARK.encode() not in file.read(100):
                raise DirectoryError(
                    f"report: {out} exists already and is not a report; nothing was written: give "
                    "another name as OUT",
                    path=out,
                )


MARK = "<!-- torchax-ckpt report -->"  # This is the template's second line.
_MAX_ROWS = 50
_MAX_TEXT = 300


def page(
    title: str,
    now_secs: float,
    runs: Sequence[RecordedRun],
    steps: Sequence[dict[str, Any]],
    num_bytes: int,
) -> str:
    """Returns the page as HTML; ``steps`` and ``num_bytes`` are what ``steps_of`` returns."""
    saves = [save for run in runs for save in run.saves]
    numbers = numbers_of(runs)
    curve = bytes_over_time(runs)
    if curve:
        curve.append((now_secs, num_bytes))
    last_secs = max((run.ended_secs for run in runs), default=now_secs)
    lost_saves = [save for save in saves if save.outcome in ("failed", "cut off")]
    figures = _figures_of_steps(steps, num_bytes)
    figures += _figures_of_saves(saves, len(lost_saves), numbers)
    if any(run.lost_steps is not None for run in runs):
        lost = sum(run.lost_steps or 0 for run in runs)
        note = "at least: a restart goes back to the newest step on storage"
        again = f"{lost:,} step{'s' * (lost != 1)}"
        figures.append(("trained a second time", again, note))
    return (
        _environment()
        .get_template("report.html.jinja")
        .render(
            title=title,
            now_secs=now_secs,
            runs=runs,
            steps=steps,
            is_cut=bool(runs) and not runs[0].named("started"),
            figures=figures,
            end_secs=now_secs if runs and runs[-1].is_running else last_secs,
            chart_width=WIDTH,
            timeline=timeline(runs, now_secs) if runs else None,
            histogram=histogram(numbers["interval_secs"]) if numbers["interval_secs"] else None,
            storage=storage(runs, curve, now_secs) if curve else None,
            metrics=_metrics(runs, steps),
            lost_saves=lost_saves,
            max_rows=_MAX_ROWS,
        )
    )


def _metrics(
    runs: Sequence[RecordedRun], steps: Sequence[dict[str, Any]]
) -> tuple[dict[str, Chart], int]:
    """Returns name -> chart of the first metrics, and the number of the others.

    Those by which the policy chooses steps are the first.
    """
    saved, there = metrics_over_steps(runs), dict[str, list[tuple[int, float]]]()
    for step in steps:
        for name, value in drawable(step["metrics"]).items():
            there.setdefault(name, []).append((step["step"], value))
    starts = [event for run in runs for event in run.named("started")]
    ranked = [rule.get("metric") for start in starts for rule in start.values.get("keeps", ())]
    names = sorted({**saved, **there}, key=lambda name: (name not in ranked, name))
    charts = {n: metric_chart(n, saved.get(n, []), there.get(n, [])) for n in names[:_MAX_METRICS]}
    return charts, len(names) - len(charts)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("torchax_ckpt.cli", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        # Escapes control characters too, but leaves the output of the template's macros as it is.
        finalize=lambda value: value if hasattr(value, "__html__") else plain(value),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        thousands=lambda value: "" if value is None else f"{value:,}",
        declined=_num_declined,
        duration=duration,
        moment=lambda secs: time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(secs)),
        metrics=lambda values: " ".join(f"{k}={number(value)}" for k, value in values.items()),
        short=lambda value: str(value)[:_MAX_TEXT],
        size=size,
    )
    return environment


def _num_declined(run: RecordedRun) -> int | None:
    """Returns how many saves the policy declined; None if the run recorded no ``closed`` event."""
    counts = (event.values.get("num_skipped") for event in run.named("closed"))
    return next((count for count in counts if count is not None), None)


_Figure = tuple[str, str, str]  # label, value and note of a number at the top of the page


def _figures_of_steps(steps: Sequence[dict[str, Any]], num_bytes: int) -> list[_Figure]:
    note = counted(len(steps), "step")
    if any(step["shared_bytes"] for step in steps):
        note += "; shared bytes count once"
    on_storage = ("on storage", size(num_bytes), note)
    if not steps:
        return [on_storage]
    verified = next((s["step"] for s in reversed(steps) if s["verified"]), None)
    note = "none is verified" if verified is None else f"newest verified: {verified:,}"
    return [("newest step", f"{steps[-1]['step']:,}", note), on_storage]


def _figures_of_saves(
    saves: Sequence[SaveSpan], num_lost: int, numbers: Mapping[str, Sequence[float]]
) -> list[_Figure]:
    if not saves:
        return []
    num_durable = sum(save.outcome == "durable" for save in saves)
    figures = [("durable saves", f"{num_durable:,}", f"{num_lost:,} failed or cut off")]
    measured = {name: Quantiles.of(found) for name, found in numbers.items()}
    for metric in Stats.metrics().values():
        if metric.label and (found := measured.get(metric.name)):
            text = duration if metric.unit == "seconds" else _count
            note = f"nine of ten: at most {text(found.p90)}"
            figures.append((metric.label, text(found.p50), note))
    new, whole = measured["new_bytes"], measured["num_bytes"]
    if new is not None and whole is not None and new != whole:
        note = f"of {size(int(whole.p50))} in a step"
        figures.append(("new in a save", size(int(new.p50)), note))
    return figures


WIDTH = 640
# The edges of the plot, the height of a lane, the distance of the labels below a plot, and the
# width of a label's character on a phone.
_LEFT, _RIGHT, _TOP, _BOTTOM, _LANE, _BELOW, _CHAR = 96, WIDTH - 12, 26, 182, 26, 22, 12
# From top to bottom. A lane's name is also the class of its marks.
_LANES = ("program", "saving", "durable", "deleted", "restored", "failed")
_MAX_TITLED, _MAX_METRICS = 120, 8
_DAY = 86_400
_BREAK_WIDTH = 18.0  # of time that is cut out; all breaks together take at most a fifth

_Place: TypeAlias = Callable[[float], float]  # of a value along an axis
_Name: TypeAlias = Callable[[float], str]  # of a value at a grid line
_Marks: TypeAlias = list[tuple[float, float, str]]  # begin, end, title
_Curve: TypeAlias = Sequence[tuple[float, float]]


def _count(value: float) -> str:
    return f"{value:,.0f}" if value < 1e6 or value % 1e4 else f"{value / 1e6:g}M"


@dataclasses.dataclass
class Chart:
    """An SVG image of the width ``WIDTH``; ``label`` says in words what it shows."""

    height: float
    label: str
    # Class, path and title of each shape; x, y, ``text-anchor`` and text of each label.
    shapes: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    texts: list[tuple[float, float, str, str]] = dataclasses.field(default_factory=list)

    def add_times(self, runs: Sequence[RecordedRun], now_secs: float, bottom: float) -> _Place:
        """Adds grid lines at round times, and bands where time is cut out; returns the axis."""
        spans = busy_spans(runs, now_secs)
        across = _cut_axis(spans)
        tick_secs = max(1, output.round_secs(sum(end - begin for begin, end in spans) / 5))
        ticks = [secs for begin, end in spans for secs in _multiples(begin, end, tick_secs)]
        ticks = ticks or [spans[0][0], spans[-1][1]]
        form = "%H:%M:%S" if tick_secs < 60 else "%H:%M" if tick_secs < _DAY else ""
        day = first_day = time.strftime("%b %d", time.gmtime(ticks[0]))
        for secs in ticks:
            today = time.strftime("%b %d", time.gmtime(secs))
            text = "" if today == day and form else today
            text = f"{text} {time.strftime(form, time.gmtime(secs))}".strip()
            if self.add_below(across(secs), bottom, text):
                day = today
        if form:
            self.texts.append((_LEFT - 8, bottom + _BELOW, "end", first_day))
        breaks: _Marks = []
        for (_, end), (begin, _) in itertools.pairwise(spans):
            left, right, length = across(end), across(begin), duration(begin - end)
            before = runs[bisect.bisect_left(runs, begin, key=lambda run: run.began_secs) - 1]
            kind, title = "idle", f"no program ran for {length}"
            if not before.ended:
                kind, title = "gap", f"no event for {length}; the program may have run on"
            self.add_label((left + right) / 2, _TOP - 13, f"{kind} {length}")
            breaks.append((left, right, title))
        self.add_marks("idle", breaks, _TOP, bottom)
        return across

    def add_below(self, x: float, bottom: float, text: str) -> bool:
        """Adds a vertical grid line, and a label below it if there is room; returns whether."""
        self.shapes.append(("g", f"M{x} {_TOP}V{bottom}", ""))
        return self.add_label(x, bottom + _BELOW, text)

    def add_label(self, x: float, y: float, text: str) -> bool:
        """Adds a label, unless it would touch the last one in its row; returns whether it did."""
        half = len(text) * _CHAR / 2
        x = min(max(x, _LEFT + half), WIDTH - half)
        last_x, last_y, _, last = self.texts[-1] if self.texts else (0.0, 0.0, "", "")
        if y == last_y and x - half < last_x + len(last) * _CHAR / 2:
            return False
        self.texts.append((x, y, "middle", text))
        return True

    def add_values(self, least: float, most: float, name: _Name, finest: float = 1) -> _Place:
        """Adds grid lines at round values, at least ``finest`` apart; returns the axis."""
        step = output.round_number(max(finest, (most - least) / 3))
        first, last = math.floor(round(least / step, 6)), math.ceil(round(most / step, 6))
        up = _axis(first * step, last * step, _BOTTOM, _TOP)
        for value in (index * step for index in range(first, last + 1)):
            self.shapes.append(("g", f"M{_LEFT} {up(value)}H{_RIGHT}", ""))
            self.texts.append((_LEFT - 8, up(value), "end", name(value)))
        return up

    def add_marks(self, name: str, marks: _Marks, top: float, bottom: float) -> None:
        """Adds boxes of a class; many as one shape, in which what is at one place is drawn once."""
        if len(marks) > _MAX_TITLED:
            different = sorted({(round(begin), round(end)) for begin, end, _ in marks})
            path = "".join(_box(begin, end, top, bottom) for begin, end in different)
            self.shapes.append((name, path, f"{len(marks):,} of them, too close to tell apart"))
        else:
            self.shapes += [(name, _box(a, b, top, bottom), title) for a, b, title in marks]


def _box(left: float, right: float, top: float, bottom: float) -> str:
    return f"M{left:g} {top:g}H{max(right, left + 1.5):g}V{bottom:g}H{left:g}Z"


def _axis(least: float, most: float, begin: float, end: float) -> _Place:
    """Returns the function that places values between ``least`` and ``most``, to a tenth."""

    def place(value: float) -> float:
        share = (value - least) / ((most - least) or 1)
        return round(begin + min(1.0, max(0.0, share)) * (end - begin), 1)

    return place


def _cut_axis(spans: _Curve) -> _Place:
    """Returns the axis of times that has these spans only, and narrow breaks between them."""
    width = min(_BREAK_WIDTH, (_RIGHT - _LEFT) / 5 / len(spans))
    room = _RIGHT - _LEFT - width * (len(spans) - 1)
    scale = room / sum(end - begin for begin, end in spans)
    lengths = [(end - begin) * scale + width for begin, end in spans]
    lefts = [*itertools.accumulate(lengths, initial=float(_LEFT))]

    def place(secs: float) -> float:
        index = max(0, bisect.bisect(spans, (secs, math.inf)) - 1)
        begin, end = spans[index]
        return round(lefts[index] + (min(max(secs, begin), end) - begin) * scale, 1)

    return place


def _multiples(least: float, most: float, step: float) -> list[float]:
    return [n * step for n in range(math.ceil(least / step), math.floor(most / step) + 1)]


def timeline(runs: Sequence[RecordedRun], now_secs: float) -> Chart:
    """Draws the training step over time and, below this curve, a lane for each kind of event."""
    lanes = _lanes(runs)
    chart = Chart(
        _BOTTOM + 48 + len(lanes) * _LANE,
        f"Timeline: {counted(len(runs), 'program')}, {counted(len(lanes['saving']), 'save')}, "
        f"{len(lanes['durable'])} durable, {len(lanes['failed'])} failed or cut off",
    )
    across = chart.add_times(runs, now_secs, _BOTTOM + len(lanes) * _LANE + 6)
    curves = [steps_over_time(run) for run in runs]
    up = chart.add_values(0, max((step for c in curves for _, step in c), default=1) or 1, _count)
    for curve in curves:
        if points := _thinned((across(secs), up(step)) for secs, step in curve):
            # The cap of its end shows a curve of one point.
            chart.shapes.append(("line", f"{_line(points)}h0", ""))
    for index, (name, marks) in enumerate(lanes.items()):
        y = _BOTTOM + 14 + (index + 0.5) * _LANE
        chart.texts.append((_LEFT - 8, y, "end", name))
        chart.shapes.append(("g", f"M{_LEFT} {y}H{_RIGHT}", ""))
        placed = [(across(begin), across(end), title) for begin, end, title in marks]
        chart.add_marks(name, placed, y - 6, y + 6)
    return chart


def storage(
    runs: Sequence[RecordedRun], curve: Sequence[tuple[float, int]], now_secs: float
) -> Chart:
    """Draws a curve (seconds since the epoch, bytes) of what all steps take on storage."""
    most = max(nbytes for _, nbytes in curve)
    label = f"Storage over time: at most {size(most)}, now {size(curve[-1][1])}"
    chart = Chart(_BOTTOM + 36, label)
    across = chart.add_times(runs, now_secs, _BOTTOM)
    up = chart.add_values(0, most or 1, lambda nbytes: size(int(nbytes)))
    points = _thinned((across(secs), up(nbytes)) for secs, nbytes in curve)
    path = "".join(f"H{x}V{y}" for x, y in points)
    chart.shapes.append(("area", f"M{points[0][0]} {_BOTTOM}{path}V{_BOTTOM}Z", ""))
    return chart


def metric_chart(name: str, saved: _Curve, there: _Curve) -> Chart:
    """Draws a metric over steps: a dot for each that was saved, a large one if it is there now."""
    steps, values = zip(*saved, *there, strict=True)
    first, last, least, most = min(steps), max(steps), min(values), max(values)
    chart = Chart(_BOTTOM + 36, f"{name}: from {number(least)} to {number(most)}")
    across = _axis(first, last, _LEFT, _RIGHT)
    for step in _multiples(first, last, output.round_number(max(1, (last - first) / 5))):
        chart.add_below(across(step), _BOTTOM, _count(step))
    finest = max(abs(least), abs(most), 1e-290) * 1e-5  # so that the labels differ
    up = chart.add_values(least, most, lambda value: number(float(value)), finest)
    points = _thinned((across(step), up(value)) for step, value in saved)
    dots = _thinned((across(step), up(value)) for step, value in there)
    if points:
        chart.shapes.append(("line", _line(points), ""))
    for kind, at in (("saved", points), ("kept", dots)):
        chart.shapes.append((kind, "".join(f"M{x} {y}h0" for x, y in at), kind))
    return chart


def histogram(values: Sequence[float]) -> Chart:
    """Draws a histogram of seconds between snapshots; an extra bar counts outliers."""
    ordered = sorted(values)
    median = duration(ordered[len(ordered) // 2])
    label = f"Seconds between snapshots: {counted(len(values), 'interval')}, half below {median}"
    chart = Chart(_BOTTOM + 36, label)
    p95 = ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)))]
    has_rest = ordered[-1] > 1.5 * p95
    most = max(1e-9, p95 if has_rest else ordered[-1])  # floats underflow near 0
    tick_secs = output.round_secs(most / 4)
    bin_secs = tick_secs / 4
    num_bins = max(1, math.ceil(most / bin_secs))
    counts = [0] * (num_bins + has_rest)
    for value in ordered:
        counts[min(len(counts) - 1, int(value / bin_secs))] += 1
    up, across = chart.add_values(0, max(counts), _count), _axis(0, len(counts), _LEFT, _RIGHT)
    edges = [duration(bin_secs * index) if index else "0" for index in range(num_bins + 1)]
    for index, count in enumerate(counts):
        is_rest = index == num_bins
        title = f"over {edges[-1]}" if is_rest else f"{edges[index]} to {edges[index + 1]}"
        path = _box(across(index) + 1, across(index + 1) - 1, up(count), _BOTTOM)
        chart.shapes.append(("rest" if is_rest else "bar", path, f"{title}: {count}"))
    for index in range(0, num_bins + 1 - 3 * has_rest, 4):
        chart.add_below(across(index), _BOTTOM, edges[index])
    if has_rest:
        chart.add_label(across(len(counts)), _BOTTOM + _BELOW, f"> {edges[-1]}")
    return chart


def _line(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in points)


def _lanes(runs: Sequence[RecordedRun]) -> dict[str, _Marks]:
    """Returns the marks of each lane as (begin, end, title), in seconds since the epoch."""
    lanes: dict[str, _Marks] = {name: [] for name in _LANES}
    for run in runs:
        end = "closed" if run.ended else "runs" if run.is_running else "ended without close"
        title = f"program {run.name} on {run.host}: {end}"
        lanes["program"].append((run.began_secs, run.ended_secs, title))
        for save in run.saves:
            begin, at = save.began_secs, save.ended_secs
            title = f"step {save.step}: {save.outcome}, {duration(at - begin)}"
            lanes["saving"].append((begin, at, title))
            if save.outcome == "durable":
                lanes["durable"].append((at, at, f"step {save.step} is durable"))
            elif save.outcome in ("failed", "cut off"):
                lanes["failed"].append((at, at, f"step {save.step}: {save.error or 'cut off'}"))
        for event in run.named("deleted", "set_aside", "restored"):
            steps = event.values.get("steps") or [event.step]
            title = f"{event.name.replace('_', ' ')}: step {', '.join(map(str, steps[:20]))}"
            lane = "restored" if event.name == "restored" else "deleted"
            lanes[lane].append((event.time_secs, event.time_secs, title))
    return lanes


def _thinned(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the highest and the last point of a curve in each column of the drawing."""
    columns: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        highest, _ = columns.setdefault(round(x), [(x, y), (x, y)])
        columns[round(x)] = [min(highest, (x, y), key=lambda p: p[1]), (x, y)]  # y grows downwards
    return [point for column in columns.values() for point in dict.fromkeys(column)]
