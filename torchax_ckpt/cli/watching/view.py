"""Shows what is known of a run, as a view for people or as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchax_ckpt.cli import output
from torchax_ckpt.cli.output import duration, plain, size
from torchax_ckpt.telemetry.stats import Quantiles
from torchax_ckpt.telemetry.timeline import RecordedRun, Save

_MAX_SAVES = 8
_STYLES = {"durable": "green", "failed": "red", "cut off": "red", "in flight": "yellow"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """What one look at a run's directory found.

    Attributes:
      path: the directory.
      now_secs: when it was read, in seconds since the epoch.
      runs: the recorded programs, oldest first; may be empty.
      steps: the numbers of the steps, oldest first.
      committed: when the newest step was committed, as ``output.committed_at`` says it; None
        without a step, or if the record of the time is damaged.
      num_bytes: the size of the newest step on storage; None without a step.
      free_bytes, disk_bytes: the room left on the file system, and its size; None on a bucket.
    """

    path: str
    now_secs: float
    runs: Sequence[RecordedRun]
    steps: Sequence[int]
    committed: str | None
    num_bytes: int | None
    free_bytes: int | None
    disk_bytes: int | None

    @property
    def program(self) -> RecordedRun | None:
        """The program that began last; None if no program recorded events."""
        return self.runs[-1] if self.runs else None

    @property
    def failures(self) -> list[Save]:
        """The saves of all recorded programs that failed or were cut off, oldest first."""
        return [s for run in self.runs for s in run.saves if s.outcome in ("failed", "cut off")]


def view(seen: Seen) -> RenderableType:
    """Returns the view, which rich prints."""
    lines = Table.grid(padding=(0, 2))
    for label, text, style in (
        ("directory", seen.path, "bold"),
        ("program", *_program(seen)),
        ("newest step", _newest(seen), ""),
        *_saving(seen),
        *_costs(seen),
        *_failures(seen),
        *_room(seen),
    ):
        # Texts of a directory are untrusted, so no markup or control character may take effect.
        lines.add_row(Text(label, style="dim"), Text(plain(text), style=style))
    program = seen.program
    return Group(lines, _table(seen, program)) if program and program.saves else lines


def _program(seen: Seen) -> tuple[str, str]:
    """Returns what is known of the newest program, and the style of this text."""
    program = seen.program
    if program is None:
        return "no program recorded events here; only the steps are known", "yellow"
    started = program.named("started")
    pid = started[0].values.get("pid") if started else None
    where = f" on {program.host}, process {pid}" if program.host and pid is not None else ""
    reached = "" if program.last_step is None else f", at step {program.last_step} or later"
    ago = duration(max(0.0, seen.now_secs - program.ended_secs))
    if program.is_running:
        since = duration(max(0.0, seen.now_secs - program.began_secs))
        least = "" if started else "at least "  # the oldest events are not read
        return f"running{where} for {least}{since}{reached}; last event {ago} ago", "green"
    if program.ended:
        return f"closed {ago} ago{where}{reached.removesuffix(' or later')}", ""
    return f"ended without close{where}; last event {ago} ago{reached}", "red"


def _newest(seen: Seen) -> str:
    if not seen.steps:
        return "none is durable yet"
    of = "the only step" if len(seen.steps) == 1 else f"{len(seen.steps)} steps"
    return (
        f"{seen.steps[-1]}, durable for {output.age(seen.committed)}, "
        f"{size(seen.num_bytes or 0)}; {of}"
    )


def _saving(seen: Seen) -> list[tuple[str, str, str]]:
    """Returns a line about the save in flight, if there is one."""
    saves = seen.program.saves if seen.program else ()
    if not saves or saves[-1].outcome != "in flight":
        return []
    since = duration(max(0.0, seen.now_secs - saves[-1].began_secs))
    return [("in flight", f"step {saves[-1].step}, for {since}", "yellow")]


def _costs(seen: Seen) -> list[tuple[str, str, str]]:
    """Returns a line for each measured time of the newest program's saves."""
    saves = seen.program.saves if seen.program else ()
    found = []
    for label, values in (
        ("save blocks", [s.blocking_secs for s in saves]),
        ("durable after", [s.durable_secs for s in saves]),
        ("interval", [s.interval_secs for s in saves]),
    ):
        known = Quantiles.of([value for value in values if value is not None])
        if known is not None:
            text = f"{duration(known.p50)} (median), {duration(known.p90)} (9 of 10)"
            found.append((label, text, ""))
    return found


def _failures(seen: Seen) -> list[tuple[str, str, str]]:
    """Returns a line about the saves that failed or were cut off, if there are any."""
    if not seen.failures:
        return []
    last = seen.failures[-1]
    ago = duration(max(0.0, seen.now_secs - last.ended_secs))
    why = f": {last.error:.300}" if last.error else ""
    text = f"{len(seen.failures)}; the last, step {last.step}, {last.outcome} {ago} ago{why}"
    return [("failures", text, "red")]


def _room(seen: Seen) -> list[tuple[str, str, str]]:
    """Returns a line about the file system; none for a bucket."""
    if seen.free_bytes is None or seen.disk_bytes is None:
        return []
    text = f"{size(seen.free_bytes)} of {size(seen.disk_bytes)} free"
    if not seen.num_bytes:
        return [("disk", text, "")]
    steps = seen.free_bytes // seen.num_bytes
    style = "red" if steps < 2 else ""
    return [("disk", f"{text}: room for {steps} more steps like the newest", style)]


def _table(seen: Seen, program: RecordedRun) -> Table:
    """Returns the table of a program's latest saves, newest first."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("step", "save", "began", "blocked", "durable after", "interval", "written"):
        table.add_column(column, justify="left" if column == "save" else "right", no_wrap=True)
    for save in reversed(program.saves[-_MAX_SAVES:]):
        interval = "" if save.interval_secs is None else duration(save.interval_secs)
        if save.interval_steps is not None:
            interval += f", {save.interval_steps} steps"
        written = save.num_bytes if save.new_bytes is None else save.new_bytes
        table.add_row(
            str(save.step),
            Text(save.outcome, style=_STYLES[save.outcome]),
            f"{duration(max(0.0, seen.now_secs - save.began_secs))} ago",
            "" if save.blocking_secs is None else duration(save.blocking_secs),
            "" if save.durable_secs is None else duration(save.durable_secs),
            interval,
            "" if written is None else size(written),
        )
    return table


def as_json_of(seen: Seen) -> dict[str, Any]:
    """Returns what was seen as JSON."""
    program = seen.program
    return {
        "directory": seen.path,
        "steps": list(seen.steps),
        "newest": None
        if not seen.steps
        else {
            "step": seen.steps[-1],
            "committed": seen.committed,
            "size_bytes": seen.num_bytes,
        },
        "program": None
        if program is None
        else {
            "host": program.host,
            "running": program.is_running,
            "closed": program.ended,
            "last_step": program.last_step,
            "last_event": output.moment(int(program.ended_secs * 1e9)),
            "saves": [dataclasses.asdict(save) for save in program.saves[-_MAX_SAVES:]],
        },
        "num_failures": len(seen.failures),
        "free_bytes": seen.free_bytes,
        "disk_bytes": seen.disk_bytes,
    }
