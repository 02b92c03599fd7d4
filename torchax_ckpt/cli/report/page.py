"""Renders a report as one HTML file, which contains no scripts and loads no other file.

Jinja2 renders the page from ``page.html.jinja`` and escapes every value, because the values come
from a directory that other people may have written to. In case a value is
not escaped, a Content-Security-Policy in the page's head makes browsers block scripts and requests.
"""

from __future__ import annotations

import dataclasses
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
_WIDTHS = 960, 360  # In pixels: each chart is drawn twice, for wide and for narrow screens.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
    """The content of a page.

    Attributes:
      title: the path of the directory.
      now_secs: when the directory was read, in seconds since the epoch.
      runs: the recorded programs, oldest first; may be empty.
      steps: the steps in the directory, as ``ls --json`` prints them; oldest first.
      num_bytes: the size of all steps; bytes that several steps share count once.
      is_cut: True if the oldest events were deleted.
    """

    title: str
    now_secs: float
    runs: Sequence[RecordedRun]
    steps: Sequence[dict[str, Any]]
    num_bytes: int
    is_cut: bool


def page(contents: Contents) -> str:
    """Returns the page as HTML."""
    runs, now_secs = contents.runs, contents.now_secs
    saves = [save for run in runs for save in run.saves]
    intervals = [save.interval_secs for save in saves if save.interval_secs is not None]
    curve = bytes_over_time(runs)
    if curve:
        curve.append((now_secs, contents.num_bytes))
    last_secs = max((run.ended_secs for run in runs), default=now_secs)
    template = _environment().get_template("page.html.jinja")
    return template.render(
        **vars(contents),
        figures=_figures(contents, saves),
        end_secs=now_secs if runs and runs[-1].is_running else last_secs,
        timelines=[charts.timeline(runs, now_secs, width) for width in _WIDTHS if runs],
        histograms=[charts.histogram(intervals, width) for width in _WIDTHS if intervals],
        storage=[charts.storage(runs, curve, now_secs, width) for width in _WIDTHS if curve],
        lost_saves=[save for save in saves if _is_lost(save)],
        max_rows=_MAX_ROWS,
    )


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("torchax_ckpt.cli.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalized,
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


def _finalized(value: Any) -> Any:
    """Escapes control characters in a value, but leaves the output of template macros as it is."""
    return value if hasattr(value, "__html__") else plain(value)


def _is_lost(save: Save) -> bool:
    return save.outcome in ("failed", "cut off")


def _num_declined(run: RecordedRun) -> int | None:
    """Returns how many saves the policy declined; None if the run recorded no ``closed`` event."""
    counts = (event.values.get("num_skipped") for event in run.named("closed"))
    return next((count for count in counts if count is not None), None)


def _figures(contents: Contents, saves: Sequence[Save]) -> list[tuple[str, str, str]]:
    """Returns the label, value and note of each number that stands at the top of the page."""
    durable = [save for save in saves if save.outcome == "durable"]
    figures: list[tuple[str, str, str]] = []
    if contents.steps:
        newest = contents.steps[-1]
        verified = next((s["step"] for s in reversed(contents.steps) if s["verified"]), None)
        note = "none is verified" if verified is None else f"newest verified: {verified:,}"
        figures.append(("newest step", f"{newest['step']:,}", note))
    note = f"{len(contents.steps)} steps"
    if any(step["shared_bytes"] for step in contents.steps):
        note += "; shared bytes count once"
    figures.append(("on storage", size(contents.num_bytes), note))
    if saves:
        num_lost = sum(map(_is_lost, saves))
        figures.append(("durable saves", f"{len(durable):,}", f"{num_lost:,} failed or cut off"))
    for label, values in (
        ("save blocks", [s.blocking_secs for s in durable if s.blocking_secs is not None]),
        ("durable after", [s.durable_secs for s in durable if s.durable_secs is not None]),
        ("between snapshots", [s.interval_secs for s in saves if s.interval_secs is not None]),
    ):
        if (found := Quantiles.of(values)) is not None:
            figures.append((label, duration(found.p50), f"p90 {duration(found.p90)}"))
    if any(save.new_bytes != save.num_bytes for save in durable if save.new_bytes is not None):
        found = Quantiles.of([s.new_bytes for s in durable if s.new_bytes is not None])
        whole = Quantiles.of([s.num_bytes for s in durable if s.num_bytes is not None])
        if found is not None and whole is not None:
            note = f"of {size(int(whole.p50))} in a step"
            figures.append(("new in a save", size(int(found.p50)), note))
    steps = Quantiles.of([s.interval_steps for s in saves if s.interval_steps is not None])
    if steps is not None:
        figures.append(("steps between", f"{steps.p50:,.0f}", f"p90 {steps.p90:,.0f}"))
    if any(run.lost_steps is not None for run in contents.runs):
        lost = sum(run.lost_steps or 0 for run in contents.runs)
        figures.append(("done again", f"{lost:,} steps", "at least, after restarts"))
    return figures
