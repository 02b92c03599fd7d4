"""Owns the page that a report is: one HTML file, without scripts, that needs nothing else.

It is built as a tree and escaped as it is written, since everything in it comes from a directory
that anybody may have written to. A policy in its head forbids whatever would be fetched or run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from torchax_ckpt.cli.output import duration, number, size
from torchax_ckpt.cli.report import charts
from torchax_ckpt.cli.report.charts import element
from torchax_ckpt.telemetry.stats import Quantiles
from torchax_ckpt.telemetry.timeline import RecordedRun, Save

MARK = "<!-- torchax-ckpt report -->"
_MAX_ROWS = 50
_MAX_TEXT = 300
_WIDE, _NARROW = 960, 360

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2127; --soft: #5b6570; --grid: #dfe3e8;
  --card: #f5f7f9; --line: #1f5fbf; --saving: #8fb4e8; --durable: #1b7a46; --failed: #b3261e;
  --restored: #7a3fb0; --deleted: #6b7580; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --ink: #e8ebee; --soft: #a3adb8;
  --grid: #333a43; --card: #1d232a; --line: #7fb0f5; --saving: #3f6ba8; --durable: #5fcf91;
  --failed: #ff8a80; --restored: #c79bf0; --deleted: #97a1ac; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1040px; padding: 16px; background: var(--paper);
  color: var(--ink); font: 16px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 8px 0 0; } h2 { font-size: 1.15rem; margin: 32px 0 4px; }
p { margin: 4px 0 12px; } .soft { color: var(--soft); font-size: .9rem; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(220px, 45%), 1fr));
  gap: 8px; margin: 16px 0; }
dl div { background: var(--card); border-radius: 8px; padding: 8px 12px; }
dt { color: var(--soft); font-size: .85rem; }
dd { margin: 0; font-size: 1.2rem; font-variant-numeric: tabular-nums; }
dd small { display: block; color: var(--soft); font-size: .8rem; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg.narrow { display: none; }
@media (max-width: 620px) { svg.wide { display: none; } svg.narrow { display: block; } }
svg text { fill: var(--soft); } .g { stroke: var(--grid); stroke-width: 1; }
.line { fill: none; stroke: var(--line); stroke-width: 2; stroke-linejoin: round; }
.mark { fill: var(--line); } .area { fill: var(--saving); stroke: var(--line); stroke-width: 1.5; }
.bar { fill: var(--line); } .rest { fill: var(--deleted); }
.program { fill: var(--grid); stroke: var(--soft); stroke-width: 1; }
.saving { fill: var(--saving); }
.durable { fill: var(--durable); } .deleted { fill: var(--deleted); }
.restored { fill: var(--restored); }
.failed { stroke: var(--failed); stroke-width: 2.5; fill: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums; overflow-wrap: normal; }
td { white-space: nowrap; }
td.long { min-width: 220px; white-space: normal; overflow-wrap: anywhere; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--grid);
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; } .n { text-align: right; }
summary { cursor: pointer; } details { margin: 8px 0; }
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
    """What is on the page.

    Attributes:
      title: the directory.
      now_secs: when it was looked at, in seconds since the epoch.
      runs: as they began; may be none.
      steps: those that are there, as ``ls`` says them; oldest first.
      num_bytes: what they take together.
      is_cut: whether the oldest events were left out.
    """

    title: str
    now_secs: float
    runs: Sequence[RecordedRun]
    steps: Sequence[dict[str, Any]]
    num_bytes: int
    is_cut: bool


def page(contents: Contents) -> str:
    """The file's content."""
    title = f"{contents.title[:_MAX_TEXT]}: checkpoints"
    body = element(
        "main", None, element("h1", None, title), _subtitle(contents), _figures(contents)
    )
    if contents.runs:
        _add_drawings(body, contents)
        _add(body, "Programs", "", _runs_table(contents.runs))
        troubles = [s for r in contents.runs for s in r.saves if s.outcome in ("failed", "cut off")]
        if troubles:
            _add(body, "Saves that were lost", "", _troubles_table(troubles))
    else:
        text = "No events are recorded in this directory: only the steps themselves are known."
        body.append(element("p", None, text))
    if contents.steps:
        _add(body, "Steps", "What can be restored now, newest first.", _steps_table(contents.steps))
    head = element(
        "head",
        None,
        element("meta", {"charset": "utf-8"}),
        element("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        element(
            "meta",
            {
                "http-equiv": "Content-Security-Policy",
                "content": "default-src 'none'; style-src 'unsafe-inline'",
            },
        ),
        element("title", None, title),
    )
    style = Element("style")
    style.text = _STYLE
    head.append(style)
    html = element("html", {"lang": "en"}, head, element("body", None, body))
    text = ElementTree.tostring(html, encoding="unicode", method="html")
    return f"<!DOCTYPE html>\n{MARK}\n{text}\n"


def _add(body: Element, heading: str, said: str, *content: Element) -> None:
    parts = [
        element("h2", None, heading),
        *([element("p", {"class": "soft"}, said)] if said else []),
    ]
    body.append(element("section", None, *parts, *content))


def _subtitle(contents: Contents) -> Element:
    said = f"As of {_moment(contents.now_secs)}. Times are UTC."
    if contents.runs:
        last = contents.runs[-1]
        if last.is_running:
            state = "A program is writing to this directory"
        elif last.ended:
            state = "The last program has closed it"
        else:
            state = "The last program ended without closing it: killed, or crashed"
        where = f", at step {last.last_step:,}" if last.last_step is not None else ""
        said = f"{state}{where}. {said}"
    if contents.is_cut:
        said += " The oldest events were not kept."
    return element("p", {"class": "soft"}, said)


def _figures(contents: Contents) -> Element:
    saves = [save for run in contents.runs for save in run.saves]
    durable = [save for save in saves if save.outcome == "durable"]
    figures: list[tuple[str, str, str]] = []
    if contents.steps:
        newest = contents.steps[-1]
        verified = next((s["step"] for s in reversed(contents.steps) if s["verified"]), None)
        said = "none is verified" if verified is None else f"newest verified: {verified:,}"
        figures.append(("newest step", f"{newest['step']:,}", said))
    figures.append(("on storage", size(contents.num_bytes), f"{len(contents.steps)} steps"))
    if saves:
        num_lost = sum(save.outcome in ("failed", "cut off") for save in saves)
        figures.append(("durable saves", f"{len(durable):,}", f"{num_lost:,} failed or cut off"))
    for label, values in (
        ("save blocks", [s.blocking_secs for s in durable if s.blocking_secs is not None]),
        ("durable after", [s.durable_secs for s in durable if s.durable_secs is not None]),
        ("between snapshots", [s.interval_secs for s in saves if s.interval_secs is not None]),
    ):
        if (found := Quantiles.of(values)) is not None:
            figures.append((label, duration(found.p50), f"p90 {duration(found.p90)}"))
    steps = Quantiles.of([s.interval_steps for s in saves if s.interval_steps is not None])
    if steps is not None:
        figures.append(("steps between", f"{steps.p50:,.0f}", f"p90 {steps.p90:,.0f}"))
    if any(run.lost_steps is not None for run in contents.runs):
        lost = sum(run.lost_steps or 0 for run in contents.runs)
        figures.append(("done again", f"{lost:,} steps", "at least, after restarts"))
    return element(
        "dl",
        None,
        *(
            element(
                "div",
                None,
                element("dt", None, label),
                element("dd", None, value, element("small", None, note)),
            )
            for label, value, note in figures
        ),
    )


def _add_drawings(body: Element, contents: Contents) -> None:
    runs, now_secs = contents.runs, contents.now_secs
    widths = (_WIDE, _NARROW)
    end_secs = now_secs if runs[-1].is_running else max(run.ended_secs for run in runs)
    _add(
        body,
        "Timeline",
        f"{_moment(runs[0].began_secs)} to {_moment(end_secs)}. The step of the training over "
        "time. Below: programs, saves in flight, when they were durable, deletions, restores "
        "(triangles), saves that failed or were cut off (crosses).",
        *(charts.timeline(runs, now_secs, width) for width in widths),
    )
    intervals = [s.interval_secs for r in runs for s in r.saves if s.interval_secs is not None]
    if intervals:
        _add(
            body,
            "Between snapshots",
            "How far apart snapshots were taken: each is work that a failure could have cost.",
            *(charts.histogram(intervals, width) for width in widths),
        )
    _add(
        body,
        "On storage",
        "What all steps take together, as it was recorded; the last point is what is there now.",
        *(charts.storage(runs, (now_secs, contents.num_bytes), width) for width in widths),
    )


def _runs_table(runs: Sequence[RecordedRun]) -> Element:
    rows = []
    for run in reversed(runs):
        end = "closed" if run.ended else "running" if run.is_running else "killed, or crashed"
        told = (e.values.get("num_skipped") for e in run.named("closed"))
        skipped = next((f"{count:,}" for count in told if count is not None), "")
        rows.append(
            (
                _moment(run.began_secs),
                duration(run.ended_secs - run.began_secs),
                run.host,
                end,
                "" if run.first_step is None else f"{run.first_step:,} to {run.last_step:,}",
                sum(save.outcome == "durable" for save in run.saves),
                skipped,
                "" if run.lost_steps is None else f"{run.lost_steps:,}",
            )
        )
    columns = ("began", "for", "host", "ended", "steps", "durable", "declined", "done again")
    return _table(columns, rows, right=("for", "steps", "durable", "declined", "done again"))


def _troubles_table(saves: Sequence[Save]) -> Element:
    rows = [
        (
            _moment(save.ended_secs),
            f"{save.step:,}",
            save.outcome,
            save.error or "its program ended while it was in flight",
        )
        for save in reversed(saves)
    ]
    return _table(("when", "step", "how", "why"), rows, right=("step",))


def _steps_table(steps: Sequence[dict[str, Any]]) -> Element:
    rows = [
        (
            f"{step['step']:,}",
            (step["committed"] or "?").replace("T", " ").removesuffix("Z"),
            size(step["size_bytes"]),
            "yes" if step["verified"] else "no",
            "not known" if step["kept_by"] is None else ", ".join(step["kept_by"]),
            " ".join(f"{name}={number(value)}" for name, value in step["metrics"].items()),
        )
        for step in reversed(steps)
    ]
    columns = ("step", "committed", "size", "verified", "kept by", "metrics")
    return _table(columns, rows, right=("step", "size"))


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, right: Sequence[str] = ()
) -> Element:
    def kind(column: str) -> dict[str, str]:
        if column in right:
            return {"class": "n"}
        return {"class": "long"} if column in ("why", "metrics", "kept by") else {}

    head = element("tr", None, *(element("th", {"scope": "col", **kind(c)}, c) for c in columns))
    body = [
        element(
            "tr",
            None,
            *(
                element("td", kind(column), str(cell)[:_MAX_TEXT])
                for column, cell in zip(columns, row, strict=True)
            ),
        )
        for row in rows[:_MAX_ROWS]
    ]
    table = element("table", None, element("thead", None, head), element("tbody", None, *body))
    # A reader of screens, and who has no mouse, must be able to scroll it.
    box = element("div", {"class": "scroll", "tabindex": "0"}, table)
    if len(rows) > _MAX_ROWS:
        more = f"and {len(rows) - _MAX_ROWS:,} more"
        return element("div", None, box, element("p", {"class": "soft"}, more))
    return box


def _moment(secs: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(secs))
