"""The command ``report``, which reads a run's directory and writes an HTML page about the run."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etils import epath

from torchax_ckpt.cli import output
from torchax_ckpt.cli.exit_codes import OK, UsageError
from torchax_ckpt.cli.report.page import MARK, Contents, page
from torchax_ckpt.cli.show import steps_of, writer_of
from torchax_ckpt.cli.step_arguments import existing
from torchax_ckpt.errors import DirectoryError
from torchax_ckpt.storage.medium import fsync, permissions
from torchax_ckpt.telemetry.journal import read_events
from torchax_ckpt.telemetry.stats import Quantiles
from torchax_ckpt.telemetry.timeline import RecordedRun, runs_of


def report(directory: str, argument: Path | None, option: Path | None, *, as_json: bool) -> int:
    """Runs ``torchax-ckpt report``; returns the exit code.

    Args:
      directory: the run's directory.
      argument, option: the file to write, as the argument OUT or the option ``--output``; None if
        it was not given. Without both, the file is ``report.html``.
      as_json: True to print a summary of each recorded program as JSON, instead of one line.

    Raises:
      UsageError: the argument and the option name different files, or the file is a directory or
        an URL.
      DirectoryError: the file exists and is not a report.
    """
    if argument is not None and option not in (None, argument):
        raise UsageError(
            f"report: expected one page to write, found two: {argument} and --output {option}; "
            "leave one of them out"
        )
    out = argument or option or Path("report.html")
    _require_ours(out)
    run = existing(directory)
    now_secs = time.time()
    steps, num_bytes = steps_of(run)
    writer = writer_of(run)
    runs = runs_of(read_events(run.path), is_running=writer is not None and writer[1])
    contents = Contents(
        title=str(run.path),
        now_secs=now_secs,
        runs=runs,
        steps=steps,
        num_bytes=num_bytes,
        is_cut=bool(runs) and not runs[0].named("started"),
    )
    _write(out, page(contents))
    if as_json:
        output.print_json(
            {"directory": str(run.path), "page": str(out), "runs": [_as_json(r) for r in runs]}
        )
    else:
        saves = sum(len(r.saves) for r in runs)
        output.print_line(f"{out}: {len(runs)} programs, {saves} saves, {len(steps)} steps")
    return OK


def _as_json(run: RecordedRun) -> dict[str, Any]:
    def quantiles(values: Sequence[float | None]) -> dict[str, float] | None:
        found = Quantiles.of([value for value in values if value is not None])
        return None if found is None else vars(found)

    outcomes = [save.outcome for save in run.saves]
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
        "blocking_secs": quantiles([save.blocking_secs for save in run.saves]),
        "durable_secs": quantiles([save.durable_secs for save in run.saves]),
        "interval_secs": quantiles([save.interval_secs for save in run.saves]),
        "num_bytes": quantiles([save.num_bytes for save in run.saves]),
        "new_bytes": quantiles([save.new_bytes for save in run.saves]),
    }


def _require_ours(out: Path) -> None:
    """Raises if ``out`` is a directory, a URL or a file that is not an earlier report.

    Raises:
      UsageError: ``out`` is a directory or an URL.
      DirectoryError: ``out`` exists and is not a report.
    """
    # pathlib turns gs://bucket into the parts "gs:" and "bucket".
    if out.is_dir() or (out.parts and out.parts[0].endswith(":")):
        raise UsageError(
            f"report: {out}: expected the name of a local file, found a directory or a URL"
        )
    if out.exists():
        with open(out, "rb") as file:
            if MARK.encode() not in file.read(100):
                raise DirectoryError(
                    f"report: {out} exists already and is not a report; nothing was written: give "
                    "another name as OUT",
                    path=out,
                )


def _write(out: Path, content: str) -> None:
    """Writes the page to a temporary file and renames it, so that no browser loads half a page."""
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    try:
        permissions.make_folder(epath.Path(out.parent))
        partial.write_text(content, encoding="utf-8", errors="replace")
        fsync.swap_in(partial, out)
    finally:
        partial.unlink(missing_ok=True)
