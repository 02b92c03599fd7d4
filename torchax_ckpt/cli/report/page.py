"""Renders a report as one HTML file, which contains no scripts and loads no other file.

The values come from a directory that other people may have written to. Jinja2 escapes each in
``page.html.jinja``; a Content-Security-Policy makes browsers block scripts and requests besides.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jinja2

from torchax_ckpt.cli.output import duration, number, plain, size
from torchax_ckpt.cli.report import charts
from torchax_ckpt.telemetry.stats import Quantiles
from torchax_ckpt.telemetry.timeline import RecordedRun, Save, bytes_over_time

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
    intervals = [save.interval_secs for save in saves if save.interval_secs is not None]
    curve = bytes_over_time(runs)
    if curve:
        curve.append((now_secs, num_bytes))
    last_secs = max((run.ended_secs for run in runs), default=now_secs)
    lost_saves = [save for save in saves if save.outcome in ("failed", "cut off")]
    figures = [*_figures_of_steps(steps, num_bytes), *_figures_of_saves(saves, len(lost_saves))]
    if any(run.lost_steps is not None for run in runs):
        lost = sum(run.lost_steps or 0 for run in runs)
        figures.append(("done again", f"{lost:,} steps", "at least, after restarts"))
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            title=title,
            now_secs=now_secs,
            runs=runs,
            steps=steps,
            is_cut=bool(runs) and not runs[0].named("started"),
            figures=figures,
            end_secs=now_secs if runs and runs[-1].is_running else last_secs,
            chart_width=charts.WIDTH,
            timeline=charts.timeline(runs, now_secs) if runs else None,
            histogram=charts.histogram(intervals) if intervals else None,
            storage=charts.storage(runs, curve, now_secs) if curve else None,
            lost_saves=lost_saves,
            max_rows=_MAX_ROWS,
        )
    )


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("torchax_ckpt.cli.report", "."),
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
    note = f"{len(steps)} steps"
    if any(step["shared_bytes"] for step in steps):
        note += "; shared bytes count once"
    on_storage = ("on storage", size(num_bytes), note)
    if not steps:
        return [on_storage]
    verified = next((s["step"] for s in reversed(steps) if s["verified"]), None)
    note = "none is verified" if verified is None else f"newest verified: {verified:,}"
    return [("newest step", f"{steps[-1]['step']:,}", note), on_storage]


def _figures_of_saves(saves: Sequence[Save], num_lost: int) -> list[_Figure]:
    if not saves:
        return []
    num_durable = sum(save.outcome == "durable" for save in saves)
    figures = [("durable saves", f"{num_durable:,}", f"{num_lost:,} failed or cut off")]
    for label, name in (
        ("save blocks", "blocking_secs"),
        ("durable after", "durable_secs"),
        ("between snapshots", "interval_secs"),
    ):
        if (found := quantiles(saves, name)) is not None:
            figures.append((label, duration(found.p50), f"p90 {duration(found.p90)}"))
    new, whole = quantiles(saves, "new_bytes"), quantiles(saves, "num_bytes")
    if new is not None and whole is not None and new != whole:
        figures.append(
            ("new in a save", size(int(new.p50)), f"of {size(int(whole.p50))} in a step")
        )
    if (found := quantiles(saves, "interval_steps")) is not None:
        figures.append(("steps between", f"{found.p50:,.0f}", f"p90 {found.p90:,.0f}"))
    return figures


def quantiles(saves: Sequence[Save], name: str) -> Quantiles | None:
    """Returns the quantiles of an attribute of saves; None if no save has it."""
    return Quantiles.of([v for save in saves if (v := getattr(save, name)) is not None])
